"""One model being trained: its weights, optimiser, folder and records. The loop steps a list of these."""

import math
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import yaml
from torch import Tensor

from data.loader import IGNORED_TARGET
from data.tokens import TokenData
from errors import UserError
from files import write_json, write_text
from model.gpt import GPT
from model.init import keyed_generator
from records import ONE_THREAD, is_run, load_run, run_label, summarize, undisturbed_ms
from training import checkpoint
from training.config import Compile, OnSpike, WandbMode
from training.device import compiled
from training.distributed import ALONE, World
from training.environment import utc_now
from training.folder import folder_of, plain, with_history
from training.optim import AdamW, guarded_update, own_part
from training.sample import sample_text
from training.schedule import lr_at
from training.spikes import Spikes
from training.timing import WARMUP_STEPS, core_waits, now, peak_flops
from training.tracker import Silent, Tracker, cut_metrics
from training.wandb_page import new_run_id, start_wandb

NUMBERS = ("train/loss", "train/grad_norm", "train/spike")


class Diverged(UserError):
    """A loss or gradient of `run` that is not finite, or a spike; its weights are those before it."""

    exit_code = 1

    def __init__(self, message: str, run: "Run"):
        super().__init__(message)
        self.run = run


class Run:
    """Builds the model and its optimiser; `open` makes its folder. `data` is shared by all runs of a process.

    Of the processes that train together the first one alone writes.
    """

    def __init__(self, cfg, data: TokenData, world: World = ALONE, writer: checkpoint.Writer | None = None):
        self.cfg, self.data, self.folder, self.world = cfg, data, folder_of(cfg), world
        self.writer = writer or checkpoint.Writer()
        self.last, self.best = checkpoint.Staged(world), checkpoint.Staged(world)
        self.device = world.device(cfg.device)
        separator = data.separator if cfg.data.document_mask else None
        if cfg.data.document_mask and separator is None:
            raise UserError(
                "data.document_mask=true needs documents with end-of-text between them, and here is none; leave it out"
            )
        how = {"kernels": cfg.kernels, "seed": cfg.seed, "separator": separator}
        self.model = GPT(cfg.model, data.vocab_size, **how).to(self.device)
        self.loss = world.spread(self.model, compiled(self.model, self.device, cfg.compile, cfg.compile_mode))
        self.optimizer = AdamW(self.model, cfg.optim, world)
        blank = torch.zeros(self.micro_batch, cfg.model.block_size, dtype=torch.int64, device=self.device)
        with self.autocast():
            world.rehearse(self.model, lambda: self.loss(blank, blank))
        self.peak_flops = peak_flops(self.device, cfg.dtype)
        on_spike = cfg.train.on_spike
        watching = on_spike != OnSpike.ignore
        self.spikes = Spikes(cfg.train.spike_sigma, self.device, stop=on_spike == OnSpike.stop) if watching else None
        self.best_val_loss: float | None = None
        self.positions: list[dict] = []  # of a stream, where a checkpoint found it
        self.val_loss = math.nan
        self.wandb_id = new_run_id()
        self.pending: list[tuple[dict, list[Tensor]]] = []
        self.losses: list[float] = []
        self.step_ms: list[float] = []  # NaN where undisturbed_ms is
        self.n_timed = 0
        # held between steps, as a twin holds its own
        self.own_bytes = sum(own_part(t).nbytes for named in self.tensors().values() for t in named.values())
        self.own_bytes += world.bucket_bytes(self.model)
        self.peak_memory_mib: float | None = None
        self.tracker = Silent()
        self.summary: dict = {"status": "failed"}  # until it is summed up

    @property
    def label(self) -> str:
        return run_label(plain(self.cfg))

    @cached_property
    def config(self) -> dict:
        """Its configuration in plain values, once all of it is settled."""
        return plain(self.cfg)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def micro_batch(self) -> int:
        """Sequences that this process takes at once."""
        return self.cfg.train.batch_size // (self.cfg.train.accumulate * self.world.size)

    def autocast(self):
        bfloat16 = self.cfg.dtype == "bfloat16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=bfloat16)

    def uncompiled(self):
        """A context in which blocks compile nothing for shapes other than those of training."""
        return torch.compiler.set_stance("force_eager") if self.cfg.compile == Compile.block else nullcontext()

    # one step

    def step(self, step: int, x: Tensor, y: Tensor, data_ms: float) -> None:
        """Step number `step`, from 0, on this process's rows of tokens x and targets y, (B, T); flush() reads it."""
        self.world.beat()
        began = self._start_clock()
        lr = self.lr_at(step)
        numbers = self._update(step, x, y, lr)
        n_tokens = x.numel() * self.world.size
        record = {"step": step + 1, "tokens": (step + 1) * n_tokens, "train/lr": lr, "time/data_ms": data_ms}
        record |= self._stop_clock(began, n_tokens)
        self.pending.append((record, numbers))

    def ms_by(self, clock: Callable[[], float], step: int, x: Tensor, y: Tensor) -> float:
        """Milliseconds, by `clock`, that such a step takes on a CPU at a learning rate of 0; it is not recorded."""
        began = clock()
        self._update(step, x, y, 0.0)
        return 1e3 * (clock() - began)

    def _update(self, step: int, x: Tensor, y: Tensor, lr: float) -> list[Tensor]:
        """Loss and gradient norm before the update, on the device: those of the whole batch, over its targets.

        With train.on_spike a third number is 1 where the step stood out, and 0 otherwise.
        """
        cfg, world = self.cfg, self.world
        self.model.train()
        if cfg.compile_mode != "default":
            torch.compiler.cudagraph_mark_step_begin()  # what the step before gave may be overwritten
        loss, n_targets = torch.zeros((), device=self.device), world.sum((y != IGNORED_TARGET).sum())
        parts = list(zip(x.chunk(cfg.train.accumulate), y.chunk(cfg.train.accumulate), strict=True))
        for part, (xs, ys) in enumerate(parts, start=world.rank * len(parts)):
            if cfg.model.dropout:
                torch.manual_seed(keyed_generator(cfg.seed, f"dropout {step} {part}").initial_seed())
            with world.accumulating(self.loss, more=xs is not parts[-1][0]):
                with self.autocast():
                    part_loss = self.loss(xs, ys) * ((ys != IGNORED_TARGET).sum() / n_targets)
                (part_loss * world.size).backward()  # for gradients become the mean of the processes'
            loss += part_loss.detach()
        world.sum(loss)
        norm = guarded_update(self.optimizer, loss=loss, lr=lr, clip=cfg.train.grad_clip, spikes=self.spikes)
        return [loss, norm, *([self.spikes.latest] if self.spikes else [])]

    def lr_at(self, step: int) -> float:
        o = self.cfg.optim
        return lr_at(step, peak=o.lr, floor=o.min_lr, warmup=o.warmup, total=self.cfg.train.steps, shape=o.schedule)

    def _start_clock(self) -> tuple[dict[str, float], float]:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.others_bytes = torch.cuda.memory_allocated(self.device) - self.own_bytes
        return core_waits(self.device), now(self.device)

    def _stop_clock(self, began: tuple[dict[str, float], float], n_tokens: int) -> dict[str, float]:
        waited, start = began
        seconds = now(self.device) - start
        self.n_timed += 1
        if self.n_timed <= WARMUP_STEPS:
            return {"time/warmup_ms": 1e3 * seconds}
        if self.device.type == "cuda":
            peak = (torch.cuda.max_memory_allocated(self.device) - self.others_bytes) / 2**20
            self.peak_memory_mib = max(peak, self.peak_memory_mib or 0)
        times = {"time/step_ms": 1e3 * seconds, "time/tokens_per_s": n_tokens / seconds}
        if waits := core_waits(self.device):  # of all threads the worst, for the others wait for it
            times["time/wait_share"] = max(wait - waited.get(thread, 0) for thread, wait in waits.items()) / seconds
        if self.peak_flops:
            flops = self.model.flops_per_token() * n_tokens / self.world.size
            times["time/mfu"] = flops / seconds / self.peak_flops
        return times

    @property
    def crowded(self) -> bool:
        """Whether another process had the cores in most of the newest 50 steps that were read."""
        return self.n_timed >= WARMUP_STEPS + 50 and sum(map(math.isnan, self.step_ms[-50:])) > 40

    # records

    def flush(self) -> list[dict]:
        """Reads the pending losses and norms from the device and records them, up to the first that is not finite."""
        records = []
        if self.pending:
            pending, numbers = zip(*self.pending, strict=True)
            self.pending = []
            for record, values in zip(pending, torch.stack([torch.stack(n) for n in numbers]).tolist(), strict=True):
                records.append(record | dict(zip(NUMBERS, values, strict=False)))
                if self.ends_at(records[-1]):
                    break  # no update was made from here on
        self.losses += [record["train/loss"] for record in records]
        self.step_ms += [undisturbed_ms(record) for record in records]
        self.tracker.log(records)
        return records

    def ends_at(self, record: dict) -> str | None:
        """What is wrong with a step after which no update was made, in words."""
        loss, norm = record["train/loss"], record["train/grad_norm"]
        if not math.isfinite(loss + norm):
            return "diverged"
        return "spiked" if record.get("train/spike") and self.spikes.stop else None

    def check(self, records: list[dict]) -> None:
        """Ends the run where a loss or gradient was not finite, or was a spike to stop at."""
        for record in records:
            if what := self.ends_at(record):
                self.writer.wait()
                kept = checkpoint.steps_saved(self.checkpoints)
                raise Diverged(
                    f"{self.label} {what} at step {record['step']}: loss {record['train/loss']}, gradient norm "
                    f"{record['train/grad_norm']}, learning rate {record['train/lr']:.3g}. That update was not made. "
                    f"Last checkpoint: {checkpoint.step_folder(self.checkpoints, kept[-1]) if kept else 'none'}. "
                    "A lower optim.lr or a longer optim.warmup usually helps",
                    self,
                )

    @torch.no_grad()
    def evaluate(self, step: int, x: Tensor, y: Tensor) -> dict:
        """Validation loss, in nats per token and bits per byte, on x and y, (N, T); targets of -100 do not count.

        Bits per byte are those of the text: neither the bits nor the bytes of end-of-text are among them.
        """
        began = now(self.device)
        self.model.eval()
        world, lengths = self.world, torch.from_numpy(self.data.token_bytes)
        totals, n_tokens = torch.zeros(2, dtype=torch.float64), int((y >= 0).sum())  # of all targets, and of text
        chunks = list(zip(x.split(self.micro_batch), y.split(self.micro_batch), strict=True))
        for at in range(world.rank, -(-len(chunks) // world.size) * world.size, world.size):
            # every process takes as many, since each gathers split weights: where none is left, one that does not count
            world.beat()
            xs, ys = chunks[at % len(chunks)]
            with self.autocast(), self.uncompiled():
                losses = self.model(xs.to(self.device), ys.to(self.device), each=True).cpu().double()
            if at < len(chunks):
                totals += torch.stack([losses.sum(), losses[lengths[ys.clamp(min=0)] > 0].sum()])
        world.part(self.model)
        total, of_text = world.sum(totals).tolist()
        self.val_loss = loss = total / n_tokens
        n_bytes = int(lengths[y[y >= 0]].sum())
        record = {
            "step": step,
            "tokens": step * self.cfg.train.batch_size * self.cfg.model.block_size,
            "val/loss": loss,
            "val/bpb": of_text / n_bytes / math.log(2),
            "time/eval_ms": 1e3 * (now(self.device) - began),
        }
        self.tracker.log([record])
        self.keep_best(step, loss)
        return record

    def sample(self, n_chars: int) -> str:
        """n_chars of text from the model, after the validation split's first token."""
        with self.autocast(), self.uncompiled():
            prompt = self.data.val.take(np.array([0]), 1)[0].tolist()
            text = sample_text(self.model, self.data.encoding, prompt, n_chars=n_chars, seed=self.cfg.seed)
        self.world.part(self.model)
        return text

    # folder and checkpoints

    def open(self, environment: dict, *, mode: WandbMode) -> WandbMode:
        """Makes or reopens the run's folder, with config.yaml and environment.json, and starts its tracker.

        Returns the W&B mode that came of it: offline where online could not be had, so that a twin need not try again.
        """
        if self.cfg.overwrite and is_run(self.folder):
            shutil.rmtree(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=self.cfg.resume or self.cfg.overwrite)
        except FileExistsError as e:
            raise UserError(f"{self.folder} was made by another process meanwhile; choose another name=NAME") from e
        write_text(self.folder / "config.yaml", yaml.safe_dump(self.config, sort_keys=False))
        for ending in ("summary.json", ONE_THREAD):
            (self.folder / ending).unlink(missing_ok=True)
        write_json(self.folder / "environment.json", with_history(self.folder, environment))
        wandb_run = start_wandb(
            self.folder,
            config=self.config,
            name=self.cfg.name,
            group=self.cfg.wandb.group,
            tags=[str(self.cfg.model.norm.kind), str(self.cfg.model.placement)],
            mode=mode,
            run_id=self.wandb_id,
        )
        self.tracker = Tracker(self.folder, wandb_run)
        if wandb_run is None:
            return WandbMode.disabled
        self.wandb_id = wandb_run.id
        return WandbMode.offline if wandb_run.offline else mode

    def tensors(self) -> dict[str, checkpoint.Tensors]:
        """All that a step changes, by file and name."""
        moments = checkpoint.optim_tensors(self.model, self.optimizer) | (self.spikes.state if self.spikes else {})
        return {"model": checkpoint.model_tensors(self.model), "optim": moments}

    def save(self, step: int, positions: list[dict] = ()) -> None:
        """Has a checkpoint after `step` steps written, once what was recorded up to there is on the disk.

        `positions` are those of a stream's shares, before the next batch.
        """
        state = {
            "step": step,
            "best_val_loss": self.best_val_loss,
            "wandb_id": self.wandb_id,
            "positions": [*positions],
        }
        folder = checkpoint.step_folder(self.checkpoints, step)
        self._write(self.last, folder, self.tensors(), state | {"config": self.config})

    def prune(self) -> None:
        """Has the oldest checkpoints beyond checkpoint.keep removed, once all that are being written are whole."""
        if self.world.first:
            self.writer.add(lambda: checkpoint.prune(self.checkpoints, self.cfg.checkpoint.keep))

    def keep_best(self, step: int, val_loss: float) -> None:
        """Has the weights written to checkpoints/best where this is the lowest validation loss so far."""
        if val_loss < (math.inf if self.best_val_loss is None else self.best_val_loss):
            self.best_val_loss = val_loss
            best = {"model": checkpoint.model_tensors(self.model)}
            self._write(self.best, self.checkpoints / "best", best, {"step": step, "val_loss": val_loss})

    def _write(
        self, staged: checkpoint.Staged, folder: Path, tensors: dict[str, checkpoint.Tensors], state: dict
    ) -> None:
        """Copies the tensors, and leaves the rest to the writer."""
        parts = staged.copy(tensors)
        state["tokenizer"] = self.data.record["tokenizer"]
        where = self.world.background
        staged.writing = self.writer.add(lambda: checkpoint.save(folder, parts, state, where, before=self.tracker.sync))

    def find(self, step: int) -> tuple[Path, dict]:
        """The checkpoint of `step`; CorruptCheckpoint where it is damaged or metrics.jsonl lacks a step before it."""
        found = checkpoint.check(checkpoint.step_folder(self.checkpoints, step), self.world)
        recorded = self.world.together(lambda: load_run(self.folder).step[:step].tolist())
        if recorded != list(range(1, step + 1)):
            raise checkpoint.CorruptCheckpoint(f"{self.folder}/metrics.jsonl lacks steps before it")
        return found

    def init_from(self, path: Path) -> None:
        """Takes the weights of a checkpoint or run; UserError where it has another shape or another tokenizer."""
        folder, state = checkpoint.find(path, self.world)
        theirs, ours = state.get("tokenizer"), self.data.record["tokenizer"]
        if theirs not in (None, ours) and not self.cfg.force:
            there, here = (f"{t['kind']}, {t['vocab_size']} of them" for t in (theirs, ours))
            raise UserError(
                f"{folder} was trained on other tokens ({there}, and here {here}); choose its data.tokenizer and text"
            )
        self.world.gathered(lambda: checkpoint.restore(folder, {"model": checkpoint.model_tensors(self.model)}))
        self.world.say(f"{self.label} begins with the weights of {folder}, step {state['step']}")

    def restore(self, folder: Path, state: dict) -> None:
        """Puts the run where it was when `save` wrote the checkpoint, and cuts its metrics there."""
        self.world.gathered(lambda: checkpoint.restore(folder, self.tensors()))
        self.best_val_loss, self.wandb_id = state["best_val_loss"], state["wandb_id"]
        self.positions = state.get("positions", [])

        def curves() -> tuple[list[float], list[float]]:
            cut_metrics(self.folder / "metrics.jsonl", state["step"])
            kept = load_run(self.folder)
            return kept.loss.tolist(), kept.undisturbed_ms.tolist()

        self.losses, self.step_ms = self.world.together(curves)

    def summarize(self, status: str, process_peak: float | None) -> dict:
        """Writes summary.json from what was recorded, and returns it.

        `process_peak`, MiB, is the whole process's and belongs to no run alone; CUDA counts each run's own.
        """
        self.summary = {"status": status, "ended": utc_now(), "num_params": self.model.num_params()}
        if not self.world.first:
            return self.summary
        self.summary["peak_memory_mib"] = self.peak_memory_mib
        self.summary["process_peak_mib"] = None if self.device.type == "cuda" else process_peak
        self.summary |= summarize(load_run(self.folder))
        write_json(self.folder / "summary.json", self.summary)
        return self.summary

    def close(self) -> None:
        """Ends the tracker, once the run is summed up and what was to be written is."""
        self.writer.wait()
        self.tracker.close(self.summary, exit_code=0 if self.summary["status"] == "finished" else 1)


def resume(runs: list[Run]) -> int:
    """Restores all runs from the newest step that each of them has whole; 0 when none has any checkpoint.

    A checkpoint that is corrupt, or ahead of its metrics, is named and the one before it taken; later ones are set
    aside. UserError where there are checkpoints, but none that all runs have whole.
    """
    world = runs[0].world
    saved = world.together(lambda: [checkpoint.steps_saved(run.checkpoints) for run in runs])
    for step in sorted(set.intersection(*map(set, saved)), reverse=True):
        try:
            found = [run.find(step) for run in runs]
        except checkpoint.CorruptCheckpoint as e:
            world.say(f"step {step} cannot be resumed from: {e}; going back to the one before")
            continue
        for run, (folder, state) in zip(runs, found, strict=True):
            run.restore(folder, state)
            world.together(lambda run=run, step=step: checkpoint.go_back(run.checkpoints, step))
        return step
    if any(saved):
        folders = " and ".join(str(run.checkpoints) for run in runs)
        raise UserError(f"{folders} hold no whole checkpoint of one step; overwrite=true starts again")
    world.say("there is no checkpoint to go on from: starting at step 0")
    for run in runs:
        world.together(lambda run=run: cut_metrics(run.folder / "metrics.jsonl", 0))
    return 0
