"""One run on 1 process, on 2 that each hold the model, and on 2 that hold it between them: the same numbers."""

import errno
import itertools
import json
import os
import re
import time
from pathlib import Path

import pytest
import torch

import train as program
from data.loader import TrainBatches
from errors import UserError
from model.gpt import GPT
from records import siblings
from scripts import sample
from tests.train.ranks import train_on
from tests.train.runs import COMPILED, metrics, run, same
from training import checkpoint, watchdog
from training.run import Run

STRATEGIES = ["ddp", "fsdp"]
pytestmark = pytest.mark.seconds(15)


def curve(folder: Path) -> list[tuple[float, float]]:
    return [(r["train/loss"], r["train/grad_norm"]) for r in metrics(folder) if "train/loss" in r]


def validation(folder: Path) -> list[float]:
    return [r["val/loss"] for r in metrics(folder) if "val/loss" in r]


@pytest.mark.parametrize(
    ("size", "accumulate", "how"),
    [
        (2, 1, ["dist.strategy=ddp"]),
        (2, 2, ["dist.strategy=ddp"]),
        (4, 1, ["dist.strategy=ddp", "model.activation_checkpointing=true"]),
        (2, 1, ["dist.strategy=fsdp"]),
        (2, 2, ["dist.strategy=fsdp", "model.activation_checkpointing=true"]),
        (2, 2, ["dist.strategy=fsdp", "dist.reshard=false"]),
        (4, 1, ["dist.strategy=fsdp", "dist.shard=2"]),
        pytest.param(2, 1, ["dist.strategy=ddp", "compile=full"], marks=COMPILED),
        pytest.param(2, 1, ["dist.strategy=fsdp", "compile=block"], marks=COMPILED),
    ],
)
def test_any_number_of_processes_gives_the_same_losses(small, size, accumulate, how):
    # 13 validation blocks, of which no two or four processes have equally many
    compiled = "compile=" in str(how)  # which draws its dropout by another generator
    overrides = ["train.eval_tokens=416", f"model.dropout={0 if compiled else 0.1}"]
    one = run(small(*overrides, "name=one", f"train.accumulate={size * accumulate}"))
    cfg = small(*overrides, "name=many", *how, f"train.accumulate={accumulate}")
    statuses, printed = train_on(size, cfg)
    assert statuses == [0] * size, printed
    many = Path(cfg.runs_dir) / "many"
    torch.testing.assert_close(curve(many), curve(one), rtol=2e-5, atol=0)
    torch.testing.assert_close(validation(many), validation(one), rtol=1e-5, atol=0)
    assert "step 20/20" in printed[0]
    assert printed[1:] == [""] * (size - 1)  # the first one speaks for all


def ignore_some_targets(rank: int) -> None:
    """Most targets of one row, and none of the others."""
    whole = TrainBatches.__call__

    def some(self, step, rank=0, size=1):
        x, y = whole(self, step)
        y[step % len(y), 3:] = -100
        each = len(y) // size
        return x[rank * each : (rank + 1) * each], y[rank * each : (rank + 1) * each]

    TrainBatches.__call__ = some


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_loss_is_over_all_targets_however_they_are_spread(small, strategy, monkeypatch):
    monkeypatch.setattr(TrainBatches, "__call__", TrainBatches.__call__)
    ignore_some_targets(0)
    one = run(small("name=one"))
    parts = run(small("name=parts", "train.accumulate=4"))
    cfg = small("name=many", f"dist.strategy={strategy}", "train.accumulate=2")
    statuses, printed = train_on(2, cfg, prepare=ignore_some_targets)
    assert statuses == [0, 0], printed
    for folder in (parts, Path(cfg.runs_dir) / "many"):
        torch.testing.assert_close(curve(folder), curve(one), rtol=2e-5, atol=0)


def state(folder: Path, step: int, small) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds, by the names of one process, whoever wrote it."""
    cfg = small("kernels=torch")
    run = Run(cfg, program.open_tokens(cfg.data))
    found, _ = checkpoint.check(checkpoint.step_folder(folder / "checkpoints", step))
    named = {
        "model": checkpoint.model_tensors(run.model),
        "optim": checkpoint.optim_tensors(run.model, run.optimizer),
    }
    checkpoint.restore(found, named)
    return named["model"] | named["optim"]


def test_a_run_of_several_processes_can_be_sampled_and_is_no_sibling_of_one_alone(small, capsys):
    cfg = small("name=many", "norm=rmsnorm", "dist.strategy=fsdp")
    assert train_on(2, cfg)[0] == [0, 0]
    many, one = Path(cfg.runs_dir) / "many", run(small("name=one"))
    sample.main(sample.Options(run=str(many), n_chars=5))
    assert len(capsys.readouterr().out.splitlines()[-1]) >= 5
    assert siblings(many) == []
    alone = run(small("name=alone", "norm=rmsnorm"))
    assert siblings(alone) == [one]


def test_weights_may_travel_in_bfloat16(small):
    cfg = small("name=many", "dist.strategy=fsdp", "dtype=bfloat16", "dist.gather=bfloat16")
    statuses, printed = train_on(2, cfg)
    assert statuses == [0, 0], printed
    many, one = curve(Path(cfg.runs_dir) / "many"), curve(run(small("name=one")))
    assert many != one
    torch.testing.assert_close([loss for loss, _ in many], [loss for loss, _ in one], rtol=5e-3, atol=0)
    assert {t.dtype for t in state(Path(cfg.runs_dir) / "many", 20, small).values()} == {torch.float32}


@pytest.mark.parametrize(("strategy", "size"), [("ddp", 2), ("ddp", 4), ("fsdp", 2), ("fsdp", 4)])
def test_a_resumed_run_of_several_processes_is_bit_identical(small, strategy, size):
    straight, parts = (
        small(f"name={name}", f"dist.strategy={strategy}", "model.dropout=0.1") for name in ("straight", "parts")
    )
    assert train_on(size, straight)[0] == [0] * size
    parts.train.stop_at = 10
    assert train_on(size, parts)[0] == [0] * size
    parts.train.stop_at, parts.resume = None, True
    statuses, printed = train_on(size, parts)
    assert statuses == [0] * size
    assert "step 10 of 20" in printed[0]
    a, b = (Path(cfg.runs_dir) / cfg.name for cfg in (straight, parts))
    assert metrics(a) == metrics(b)
    assert same(state(a, 20, small), state(b, 20, small))


@pytest.mark.parametrize(
    ("before", "after"),
    [("fsdp 2", "none 1"), ("none 1", "fsdp 2"), ("fsdp 2", "fsdp 4"), ("fsdp 4", "ddp 2"), ("hsdp 4", "fsdp 2")],
)
def test_any_number_of_processes_goes_on_from_the_checkpoint_of_another(small, before, after):
    straight = run(small("name=straight"))
    for part, more in ((before, ["train.stop_at=10"]), (after, ["resume=true"])):
        strategy, size = part.split()
        overrides = ["dist.strategy=fsdp", "dist.shard=2"] if strategy == "hsdp" else [f"dist.strategy={strategy}"]
        cfg = small("name=mixed", *overrides, *more)
        if size == "1":
            run(cfg)
        else:
            statuses, printed = train_on(int(size), cfg)
            assert statuses == [0] * int(size), printed
    mixed = Path(cfg.runs_dir) / "mixed"
    torch.testing.assert_close(curve(mixed), curve(straight), rtol=2e-5, atol=0)
    ours, theirs = state(mixed, 20, small), state(straight, 20, small)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-5)


def test_twins_train_in_lockstep_on_several_processes(small):
    pair = [small(f"norm={norm}", f"name={norm}", "dist.strategy=fsdp") for norm in ("rmsnorm", "layernorm")]
    statuses, printed = train_on(2, *pair)
    assert statuses == [0, 0], printed
    assert "gap" in printed[0]
    for cfg in pair:
        alone = run(small(f"norm={cfg.model.norm.kind}", f"name={cfg.name}-alone"))
        torch.testing.assert_close(curve(Path(cfg.runs_dir) / cfg.name), curve(alone), rtol=2e-5, atol=0)


@pytest.mark.parametrize(
    ("size", "overrides", "message"),
    [
        (2, ["dist.strategy=none"], "is for one process, and these are 2; choose ddp or fsdp"),
        (3, [], "take train.batch_size=3 or 6, or start 1, 2, 4 processes"),
        (2, ["train.accumulate=4"], "take train.batch_size=8, or start 1 processes"),
        (2, ["dist.strategy=fsdp", "dist.shard=3"], "dist.shard=3 does not divide 2 processes; these do: 1, 2"),
        (2, ["dist.strategy=fsdp", "compile=full"], "choose compile=block"),
        (2, ["dist.shard=2"], "are for dist.strategy=fsdp"),
        (2, ["dist.strategy=fsdp", "dist.gather=bfloat16"], "is for dtype=bfloat16"),
        (2, ["data.path=/nowhere"], "is no file or folder"),
    ],
)
def test_what_cannot_be_shared_is_refused_once(small, size, overrides, message):
    statuses, printed = train_on(size, small(*overrides))
    assert statuses == [2] * size, printed
    assert message in printed[0]
    assert printed[1:] == [""] * (size - 1)


def test_a_sweep_under_torchrun_is_refused(train_py, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = train_py("-m", "seed=1,2")
    assert done.returncode == 2
    assert "call torchrun for each" in done.stderr


def test_ddp_without_torchrun_is_refused(small):
    with pytest.raises(UserError, match="torchrun --nproc_per_node=2"):
        program.train([small("dist.strategy=ddp")])


def infinite_on_rank_1(rank: int) -> None:
    """The eighth loss on rank 1 is not finite."""
    if rank == 1:
        whole = GPT.forward
        calls = itertools.count()

        def broken(self, *args, **kwargs):
            loss = whole(self, *args, **kwargs)
            return loss * torch.inf if self.training and next(calls) == 7 else loss

        GPT.forward = broken


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loss_that_is_not_finite_on_one_rank_stops_all_with_one_message(small, strategy):
    cfg = small(f"dist.strategy={strategy}", "checkpoint.every=5")
    statuses, printed = train_on(2, cfg, prepare=infinite_on_rank_1)
    assert statuses == [1, 1], printed
    assert re.search("error: layernorm-pre diverged at step [78]: loss inf", printed[0])  # ddp has called it before
    assert printed[1] == ""
    summary = json.loads((Path(cfg.runs_dir) / "run" / "summary.json").read_text())
    assert summary["status"] == "diverged"


def sleeps_on_rank_1(rank: int) -> None:
    if rank == 1:
        whole = TrainBatches.__call__
        TrainBatches.__call__ = lambda self, step, *share: time.sleep(1000 * (step == 8)) or whole(self, step, *share)


def test_a_rank_that_hangs_is_named_with_its_place(small):
    statuses, printed = train_on(2, small("dist.timeout_s=3"), prepare=sleeps_on_rank_1)
    assert statuses == [watchdog.EXIT] * 2, printed
    said = "".join(printed)
    assert said.count("no step was finished in 3 s: rank 1 is at tests/train/test_distributed.py:") == 1
    assert "(<lambda>); the others wait for it" in said


def disk_of_rank_1_is_full(rank: int) -> None:
    if rank == 1:

        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model-00002-of-00002.safetensors")

        checkpoint.serialize_file = full


def test_a_full_disk_of_one_rank_stops_all_and_keeps_what_was_saved(small):
    cfg = small("dist.strategy=fsdp", "train.stop_at=10")
    assert train_on(2, cfg)[0] == [0, 0]
    cfg.train.stop_at, cfg.resume = None, True
    statuses, printed = train_on(2, cfg, prepare=disk_of_rank_1_is_full)
    assert statuses == [1, 1], printed
    assert "no space left for model-00002" in printed[0]
    assert printed[1] == ""
    saved = Path(cfg.runs_dir) / "run" / "checkpoints"
    assert checkpoint.steps_saved(saved) == [10]
    checkpoint.check(checkpoint.step_folder(saved, 10))
    assert not list(saved.glob(".new*"))


def nothing_can_be_made(rank: int) -> None:
    def refused(self, *_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    Path.mkdir = refused


def test_a_folder_that_cannot_be_written_is_named_once(small):
    cfg = small()
    program.open_tokens(cfg.data)
    statuses, printed = train_on(2, cfg, prepare=nothing_can_be_made)
    assert statuses == [1, 1], printed
    assert "Read-only file system; choose a place that can be written" in printed[0]
    assert printed[1] == ""


def test_a_missing_shard_is_named_and_the_checkpoint_before_taken(small):
    cfg = small("dist.strategy=fsdp", "train.stop_at=10", "checkpoint.every=5")
    assert train_on(2, cfg)[0] == [0, 0]
    saved = Path(cfg.runs_dir) / "run" / "checkpoints"
    (checkpoint.step_folder(saved, 10) / "optim-00002-of-00002.safetensors").unlink()
    cfg.train.stop_at, cfg.resume = None, True
    statuses, printed = train_on(2, cfg)
    assert statuses == [0, 0], printed
    assert "step 10 cannot be resumed from" in printed[0]
    assert "optim-00002-of-00002" in printed[0]
    assert "step 5 of 20" in printed[0]
