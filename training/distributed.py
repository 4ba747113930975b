"""The processes that torchrun started: how they agree, share a batch, and hold one model together."""

import contextlib
import copy
import os
import secrets
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from errors import UserError
from training.config import Device, DistConfig, Dtype, Strategy
from training.environment import machine
from training.watchdog import Watchdog

T = TypeVar("T")
PATIENCE = timedelta(days=1)  # where one process may tokenise a corpus, or write a report, while the others wait
MARGIN_S = 60  # that a collective operation waits longer than the watchdog, which says more


class World:
    """The processes that train together, of which this one is number `rank`; this class is that of one alone."""

    strategy, rank, size, local_rank = Strategy.none, 0, 1, 0
    shards: "dist.ProcessGroup | None" = None
    """Those that hold one model's weights between them, where they are split, and how many they are."""
    n_shards = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def say(self, *words) -> None:
        if self.first:
            print(*words, file=sys.stderr, flush=True)

    def device(self, kind: str) -> torch.device:
        return torch.device(kind)

    def spread(self, model: nn.Module, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Has the gradients of `loss`, which is `model` or a compiled form of it, become the mean of all processes'."""
        return loss

    def rehearse(self, model: nn.Module, loss: Callable[[], Tensor]) -> None:
        """One pass, before the first step, after which every step adds gradients up in the same order."""

    def bucket_bytes(self, model: nn.Module) -> int:
        """Bytes of the gradients that are held between steps too."""
        return 0

    def accumulating(self, loss: Callable[..., Tensor], more: bool) -> AbstractContextManager:
        """Around a micro-batch's forward and backward: gradients travel after the last one alone."""
        return nullcontext()

    def part(self, model: nn.Module) -> None:
        """Has each process keep its part of the weights alone, after a forward pass that no backward one followed."""

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        return value

    def norm(self, value: Tensor) -> Tensor:
        """The norm of a vector of which each process holds a part, whose own norm is `value`."""
        return value

    def highest(self, number: int) -> int:
        """The highest that any process gave when this was last called, so that none waits for another."""
        return number

    def together(self, what: Callable[[], T], patient: bool = False) -> T:
        """What `what()` gives on the first process, or its error, on all of them; `patient` where it may take hours."""
        return what()

    def gathered(self, what: Callable[[], T]) -> list[T]:
        """What `what()` gives on each process; an error of one is an error of all."""
        return [what()]

    def in_turn(self, what: Callable[[], T]) -> T:
        """What `what()` gives on this process, as `gathered`, but one of each machine does it before the others."""
        return what()

    def watched(self) -> AbstractContextManager:
        """While entered, a process that holds up the others is named, and ends all; `beat` says that it does not."""
        return nullcontext()

    def beat(self) -> None: ...

    @property
    def background(self) -> "World":
        """The same, to agree about something else at the same time in another thread."""
        return self


ALONE = World()


class Group(World):
    """Processes that torchrun started, once they are connected."""

    def __init__(self, cfg: DistConfig, strategy: Strategy, device: str, store: dist.Store):
        self.strategy, self.reshard, self.store = strategy, cfg.reshard, store
        self.rank, self.size, self.local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
        timeout = timedelta(seconds=cfg.timeout_s + MARGIN_S)
        self.control, self.other, self.patient = (
            dist.new_group(backend="gloo", timeout=t) for t in (timeout, timeout, PATIENCE)
        )
        self.asked: tuple[Tensor, dist.Work] | None = None
        self.watchdog = Watchdog(store, self.rank, self.size, cfg.timeout_s)
        if self.strategy == Strategy.fsdp:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import MixedPrecisionPolicy

            shard = cfg.shard or self.size
            sizes = {"replicate": self.size // shard, "shard": shard}
            if shard == self.size:
                del sizes["replicate"]
            self.mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
            self.shards, self.n_shards = self.mesh["shard"].get_group(), shard
            for group in self.mesh.get_all_groups():
                dist.distributed_c10d._set_pg_timeout(timeout, group)
            gather = torch.bfloat16 if cfg.gather == Dtype.bfloat16 else None
            self.policy = MixedPrecisionPolicy(param_dtype=gather, reduce_dtype=torch.float32)

    def device(self, kind: str) -> torch.device:
        return torch.device(kind, self.local_rank) if kind == "cuda" else torch.device(kind)

    def spread(self, model: nn.Module, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if self.strategy == Strategy.fsdp:
            from torch.distributed.fsdp import fully_shard

            how = {"mesh": self.mesh, "mp_policy": self.policy}
            for block in model.blocks:
                fully_shard(block, reshard_after_forward=self.reshard, **how)
            fully_shard(model, reshard_after_forward=False, **how)  # its backward pass begins with these weights
            return loss
        with warnings.catch_warnings():
            # torch 2.13 has another name for broadcast_buffers, which 2.11 does not know
            warnings.simplefilter("ignore", FutureWarning)
            return nn.parallel.DistributedDataParallel(loss, broadcast_buffers=False, gradient_as_bucket_view=True)

    def rehearse(self, model: nn.Module, loss: Callable[[], Tensor]) -> None:
        if self.strategy == Strategy.ddp:  # it orders its buckets anew once it has seen a backward pass
            loss().backward()
            for p in model.parameters():
                p.grad = None

    def bucket_bytes(self, model: nn.Module) -> int:
        return sum(p.nbytes for p in model.parameters()) if self.strategy == Strategy.ddp else 0

    def accumulating(self, loss: Callable[..., Tensor], more: bool) -> AbstractContextManager:
        if self.strategy == Strategy.fsdp:
            loss.set_requires_gradient_sync(not more)
            return nullcontext()
        return loss.no_sync() if more else nullcontext()

    def part(self, model: nn.Module) -> None:
        if self.strategy == Strategy.fsdp:
            for module in (*model.blocks, model):
                module.reshard()

    def sum(self, value: Tensor) -> Tensor:
        dist.all_reduce(value, group=None if value.device.type == "cuda" else self.control)
        return value

    def norm(self, value: Tensor) -> Tensor:
        if self.shards is None:
            return value
        square = value.square()
        dist.all_reduce(square, group=self.shards)
        return square.sqrt()

    def highest(self, number: int) -> int:
        before, mine = self.asked, torch.tensor(number)
        self.asked = mine, dist.all_reduce(mine, dist.ReduceOp.MAX, group=self.control, async_op=True)
        if before is None:
            return 0
        before[1].wait()
        return int(before[0])

    def together(self, what: Callable[[], T], patient: bool = False) -> T:
        outcome = [_outcome(what) if self.first else None]
        dist.broadcast_object_list(outcome, src=0, group=self.patient if patient else self.control)
        return _answer(*outcome[0])

    def gathered(self, what: Callable[[], T]) -> list[T]:
        outcomes: list = [None] * self.size
        dist.all_gather_object(outcomes, _outcome(what), group=self.control)
        return [_answer(*outcome) for outcome in outcomes]

    def in_turn(self, what: Callable[[], T]) -> T:
        view, answer = copy.copy(self), [None]
        view.control = self.patient
        for turn in (self.local_rank == 0, self.local_rank != 0):
            view.gathered(lambda turn=turn: answer.append(what()) if turn else None)
        return answer[-1]

    def watched(self) -> AbstractContextManager:
        return self.watchdog

    def beat(self) -> None:
        self.watchdog.beat()

    @property
    def background(self) -> World:
        view = copy.copy(self)
        view.control = self.other
        return view


def _outcome(what: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return what(), None
    except Exception as error:
        return None, error


def _answer(value: T | None, error: Exception | None) -> T:
    if error is not None:
        error.shared = True  # all processes have it, and the first one says it
        raise error
    return value


def launch() -> str | None:
    """The call of torchrun that started this process, the same after a restart; None without it."""
    given, parent = os.environ.get("TORCHELASTIC_RUN_ID"), os.getppid()
    if given is None:
        return None
    started = ""
    with contextlib.suppress(OSError):  # on Linux, in ticks since the machine was: other containers have equal numbers
        started = Path(f"/proc/{parent}/stat").read_text().rsplit(")", 1)[1].split()[19]
    return f"{given}-{machine()}-{parent}-{started}"


def strategy_of(cfg: DistConfig) -> Strategy:
    """The strategy that cfg means here; UserError where it cannot be had."""
    launched, size = "RANK" in os.environ, int(os.environ.get("WORLD_SIZE", 1))
    if cfg.strategy == Strategy.auto:
        return Strategy.ddp if launched and size > 1 else Strategy.none
    if cfg.strategy == Strategy.none and size > 1:
        raise UserError(f"dist.strategy=none is for one process, and these are {size}; choose ddp or fsdp")
    if cfg.strategy != Strategy.none and not launched:
        raise UserError(
            f"dist.strategy={cfg.strategy} takes processes that torchrun starts: "
            "torchrun --nproc_per_node=2 train.py ..."
        )
    return cfg.strategy


def check_shares(cfg: DistConfig, batch_size: int, accumulate: int) -> None:
    """UserError where the processes cannot take equal shares of a batch, or of the weights."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    each = size * accumulate
    if batch_size % each:
        below = batch_size // each * each
        near = " or ".join(str(n) for n in (below, below + each) if n)
        divisors = [n for n in range(1, batch_size + 1) if batch_size % (n * accumulate) == 0]
        raise UserError(
            f"train.batch_size={batch_size} cannot be shared by {size} processes with train.accumulate={accumulate}: "
            f"take train.batch_size={near}, or start {', '.join(map(str, divisors))} processes"
        )
    if strategy_of(cfg) != Strategy.fsdp and cfg != DistConfig(strategy=cfg.strategy, timeout_s=cfg.timeout_s):
        raise UserError(
            "dist.shard, dist.reshard and dist.gather are for dist.strategy=fsdp; add it, or leave them out"
        )
    if cfg.shard is not None and size % cfg.shard:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        raise UserError(
            f"dist.shard={cfg.shard} does not divide {size} processes; these do: {', '.join(map(str, divisors))}"
        )


def settle_parts(cfg, size: int) -> None:
    """Gives a stream as many parts as there are processes, unless told how many; UserError where they do not fit."""
    if not cfg.data.stream:
        return
    parts, batch = cfg.data.parts or size, cfg.train.batch_size
    if parts % size or batch % parts:
        fitting = [n for n in range(size, batch + 1, size) if batch % n == 0]
        raise UserError(
            f"a stream of data.parts={parts} cannot be shared by {size} processes in batches of {batch}; these can: "
            f"{', '.join(map(str, fitting))}, but a run that is resumed keeps the parts it began with"
        )
    cfg.data.parts = parts


def attempt(store: dist.Store, rank: int, size: int, timeout_s: float) -> str:
    """A name that all processes have, and that those before a restart had not.

    torchrun may keep its store when it restarts processes, with the addresses of those that are gone, and counts
    restarts on each machine by itself. The first process makes a name up, and the others take the one that it answers
    to: one of an earlier attempt is not answered.
    """
    end = time.monotonic() + timeout_s
    if rank == 0:
        store.set("attempt", name := secrets.token_hex(8))
        store.wait([f"{name}/{other}" for other in range(1, size)], timedelta(seconds=timeout_s))
        store.set(f"{name}/begins", "")
        store.wait([f"{name}/{other}/begins" for other in range(1, size)], timedelta(seconds=timeout_s))
        store.delete_key("attempt")
        return name
    while time.monotonic() < end:
        name = store.get("attempt").decode()
        store.set(f"{name}/{rank}", "")
        with contextlib.suppress(dist.DistStoreError):
            store.wait([f"{name}/begins"], timedelta(seconds=1))
            store.set(f"{name}/{rank}/begins", "")
            return name
    raise dist.DistStoreError(f"the first of {size} processes did not answer in {timeout_s:.0f} s")


@contextmanager
def joined(cfg) -> Iterator[World]:
    """Connects this process with the others that torchrun started for the run `cfg`, until the context ends."""
    strategy = strategy_of(cfg.dist)
    check_shares(cfg.dist, cfg.train.batch_size, cfg.train.accumulate)
    if strategy == Strategy.none:
        yield ALONE
        return
    cuda = cfg.device in (Device.auto, Device.cuda) and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    timeout = timedelta(seconds=cfg.dist.timeout_s + MARGIN_S)
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    store = dist.PrefixStore(attempt(store, rank, size, timeout.total_seconds()), store)
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        yield Group(cfg.dist, strategy, "cuda" if cuda else "cpu", store)
    finally:
        dist.destroy_process_group()
