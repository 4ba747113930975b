"""Reading run folders (config.yaml, metrics.jsonl), be the runs finished, unfinished or killed amid a line."""

import contextlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import yaml

from errors import UserError

MOST_WAIT = 0.01  # of a step that a thread had no core: undisturbed ones stay under it, others mostly wait 2 % or more
ONE_THREAD = "one_thread.json"  # of a run beside a process that never rests, see training/one_thread.py
FINAL_SHARE = 0.1  # of the steps, whose mean is the final training loss: single batches are noisy

# keys that may differ between a run and its resumption: they do not shape its numbers
FREE_KEYS = {
    "checkpoint",
    "compare",
    "train.log_every",
    "train.sample_chars",
    "resume",
    "overwrite",
    "force",
    "runs_dir",
    "name",
    "wandb",
    "train.stop_at",
    "data.path",
    "data.cache_dir",
    "data.num_proc",
    "dist.strategy",
    "dist.shard",
    "dist.reshard",
    "dist.timeout_s",
}
SEED_KEYS = ("seed", "data_seed")
SIBLING_KEYS = ("model.norm.kind", "model.placement")
COMMIT, PROCESSES = "environment.commit", "environment.processes"


@dataclass(eq=False)
class RunRecord:
    """One run's curves. Training arrays have one entry a step, NaN where a step has no such number."""

    folder: Path
    config: dict
    environment: dict
    """environment.json; empty where it is missing or damaged."""
    summary: dict
    """summary.json; empty where there is none."""
    step: np.ndarray
    loss: np.ndarray
    """Training loss, nats per token."""
    step_ms: np.ndarray
    """Milliseconds; NaN in the steps that warm a process up."""
    undisturbed_ms: np.ndarray
    """The same, NaN also where another process had the cores."""
    one_thread_ms: np.ndarray
    """CPU milliseconds of further steps by one thread, where such were taken."""
    val_step: np.ndarray
    val_loss: np.ndarray
    val_bpb: np.ndarray
    damage: str | None = None
    """What is wrong with metrics.jsonl, in words: the curves end there."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def label(self) -> str:
        return run_label(self.config)

    @property
    def tokens_per_step(self) -> int:
        return self.config["train"]["batch_size"] * self.config["model"]["block_size"]

    @property
    def warmup(self) -> int:
        return self.config["optim"]["warmup"]

    @property
    def last_step(self) -> int:
        return int(self.step[-1]) if len(self.step) else 0

    @property
    def status(self) -> str:
        """finished, interrupted, diverged or failed, as the run said when it ended; unfinished where it did not."""
        return self.summary.get("status", "unfinished")

    @property
    def diverged_at(self) -> int | None:
        """The step whose loss or gradient was not finite, and after which none was."""
        finite = np.flatnonzero(np.isfinite(self.loss))
        end = finite[-1] + 1 if len(finite) else 0
        if end < len(self.loss):
            return int(self.step[end])
        return self.last_step if self.status == "diverged" else None

    @property
    def seeds(self) -> tuple:
        return tuple(self.config.get(key) for key in SEED_KEYS)

    @cached_property
    def settings(self) -> dict:
        """What makes the run's numbers, by dotted key: configuration without names and paths, text, machine, code."""
        settings = {
            key: value
            for key, value in flat(self.config).items()
            if not {key, key.split(".")[0]} & FREE_KEYS and key != "against"
        }
        made_on = self.environment
        return settings | {
            "data.corpus": (made_on.get("data") or {}).get("corpus_sha256", "")[:8] or None,
            "environment.device": made_on.get("device"),
            "environment.torch": (made_on.get("versions") or {}).get("torch"),
            PROCESSES: f"{made_on.get('processes') or 1} {made_on.get('strategy') or ''}".strip(),
            COMMIT: made_on.get("git_commit"),
        }

    @property
    def same_batches(self) -> tuple | None:
        """Equal for runs that took the same batches; None where that is not on record."""
        hashes = self.environment.get("batch_hashes")
        return hashes and (self.seeds[1], self.tokens_per_step, *sorted(hashes.items()))

    @property
    def timed(self) -> np.ndarray:
        """Which steps have a time that counts, (n,) of bool."""
        return np.isfinite(self.step_ms)

    @cached_property
    def seconds(self) -> np.ndarray:
        """Seconds of training after each step; steps that warm a process up (compilation) count as the median step."""
        if not self.timed.any():
            return np.full(len(self.step_ms), np.nan)
        return np.cumsum(np.where(self.timed, self.step_ms, np.median(self.step_ms[self.timed]))) / 1e3


def run_label(config: dict) -> str:
    """What tells a run from its twin."""
    return f"{config['model']['norm']['kind']}-{config['model']['placement']}"


def flat(config: dict, prefix: str = "") -> dict:
    """Nested values by dotted key."""
    items = {}
    for key, value in config.items():
        items |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return items


def undisturbed_ms(record: dict) -> float:
    """Milliseconds of a step in which this process had the cores it asked for; NaN for others and for warm-up."""
    ms, waited = record.get("time/step_ms"), record.get("time/wait_share") or 0
    return math.nan if ms is None or waited > MOST_WAIT else ms


def is_run(folder: Path) -> bool:
    return (folder / "config.yaml").exists()


def load_run(folder: Path) -> RunRecord:
    """Reads a run's folder; UserError where it holds no run. A last line that a killed writer tore off is left out."""
    config = read_config(folder)
    records, damage = read_records(folder / "metrics.jsonl")
    trained = [
        (r["step"], r["train/loss"], r.get("time/step_ms"), undisturbed_ms(r)) for r in records if "train/loss" in r
    ]
    evaluated = [(r["step"], r["val/loss"], r.get("val/bpb")) for r in records if "val/loss" in r]
    step, loss, step_ms, undisturbed = np.array(trained, dtype=float).reshape(-1, 4).T  # null becomes NaN
    val_step, val_loss, val_bpb = np.array(evaluated, dtype=float).reshape(-1, 3).T
    return RunRecord(
        folder=folder,
        config=config,
        environment=_read_json(folder / "environment.json"),
        summary=_read_json(folder / "summary.json"),
        step=step.astype(int),
        loss=loss,
        step_ms=step_ms,
        undisturbed_ms=undisturbed,
        one_thread_ms=_one_thread_ms(folder),
        val_step=val_step.astype(int),
        val_loss=val_loss,
        val_bpb=val_bpb,
        damage=damage,
    )


NUMBERS = ("train/loss", "time/step_ms", "time/wait_share", "val/loss", "val/bpb")


def read_records(path: Path) -> tuple[list[dict], str | None]:
    """The records of a metrics.jsonl up to the first that is damaged, and what is wrong there, in words."""
    if not path.exists():
        return [], None
    lines = path.read_text(encoding="utf-8", errors="replace").rstrip("\n").split("\n")
    try:
        records = json.loads(f"[{','.join(lines)}]")  # twice as fast as one by one
    except ValueError:
        records = []
    if len(records) != len(lines):
        records = map(_parsed, lines)
    good = []
    for record in records:
        if not _is_record(record):
            number = len(good) + 1
            torn = "lacks its last line, which is torn"
            return good, torn if number == len(lines) else f"cannot be read from line {number} on: it ends there"
        good.append(record)
    return good, None


def _parsed(line: str):
    try:
        return json.loads(line)
    except ValueError:
        return None


def _is_record(record) -> bool:
    if type(record) is not dict or type(record.get("step")) is not int:
        return False
    return all(type(record.get(key)) in (float, int, type(None)) for key in NUMBERS)


def read_config(folder: Path) -> dict:
    """config.yaml of a run; UserError where the folder holds none, or one that cannot be read."""
    if not is_run(folder):
        inside = [f.name for f in sorted(folder.glob("*")) if is_run(f)] if folder.is_dir() else []
        hint = f"; runs in it: {', '.join(inside[:5])}{' ...' if len(inside) > 5 else ''}" if inside else ""
        raise UserError(f"{folder} is no run: it has no config.yaml{hint}")
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        config = yaml.load((folder / "config.yaml").read_text(encoding="utf-8"), Loader=loader)
        run_label(config), config["data"]["tokenizer"], dict(config.get("compare") or {})
        sizes = config["train"]["batch_size"], config["model"]["block_size"], config["optim"]["warmup"]
        if not all(type(size) is int for size in sizes):
            raise TypeError(sizes)
    except (yaml.YAMLError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{folder}/config.yaml is damaged: it is not the configuration of a run") from e
    return config


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _one_thread_ms(folder: Path) -> np.ndarray:
    ms = _read_json(folder / ONE_THREAD).get("step_ms")
    good = isinstance(ms, list) and all(type(value) in (float, int) for value in ms)
    return np.array(ms if good else [], dtype=float)


def siblings(folder: Path) -> list[Path]:
    """Finished runs beside `folder` whose settings differ from its own in exactly one of norm and placement.

    Where there are any, also those that differ from it or from them by seeds: what a verdict is made of.
    """
    ours, found = settings_of(folder), {}
    for other in sorted(folder.parent.glob("*")):
        if other != folder and is_run(other) and _read_json(other / "summary.json").get("status") == "finished":
            with contextlib.suppress(UserError):
                theirs = settings_of(other)
                found[other] = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    if not any(len(keys) == 1 and keys <= set(SIBLING_KEYS) for keys in found.values()):
        return []
    return [other for other, keys in found.items() if any(keys <= {key, *SEED_KEYS} for key in SIBLING_KEYS)]


def settings_of(folder: Path) -> dict:
    """The settings of a run, whatever it ran on, without reading its curves."""
    nothing = np.zeros(0)
    run = RunRecord(folder, read_config(folder), _read_json(folder / "environment.json"), {}, *[nothing] * 8)
    return {k: v for k, v in run.settings.items() if k == PROCESSES or not k.startswith("environment.")}


def summarize(run: RunRecord) -> dict:
    """Final losses, bits per byte and step times of one run; None for what was not measured."""
    tail = run.loss[-max(1, round(FINAL_SHARE * len(run.loss))) :]
    times = run.step_ms[run.timed]
    p10, median, p90 = np.percentile(times, [10, 50, 90]) if len(times) else [None] * 3
    evaluated = (
        len(run.val_step) and len(run.step) and run.val_step[-1] == run.step[-1]
    )  # else it is an earlier model's
    return {
        "label": run.label,
        "step": run.last_step,
        "train/loss": float(tail.mean()) if len(tail) else None,
        "val/loss": float(run.val_loss[-1]) if evaluated else None,
        "val/bpb": float(run.val_bpb[-1]) if evaluated else None,
        "time/step_ms": median,
        "time/step_ms_p10": p10,
        "time/step_ms_p90": p90,
        "time/tokens_per_s": run.tokens_per_step / median * 1e3 if median else None,
    }
