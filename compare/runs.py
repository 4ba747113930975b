"""Reading run folders and summing them up."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

FINAL_SHARE = 0.1  # of the steps, whose mean is the final training loss: single batches are noisy


@dataclass
class RunRecord:
    """One run's curves. Training arrays have one entry a step, NaN where a step has no such number."""

    folder: Path
    config: dict
    step: np.ndarray
    loss: np.ndarray
    """Training loss, nats per token."""
    step_ms: np.ndarray
    """Milliseconds; NaN in the steps that warm a process up."""
    val_step: np.ndarray
    val_loss: np.ndarray
    val_bpb: np.ndarray

    @property
    def label(self) -> str:
        return run_label(self.config)

    @property
    def tokens_per_step(self) -> int:
        return self.config["train"]["batch_size"] * self.config["model"]["block_size"]

    @property
    def warmup(self) -> int:
        return self.config["optim"]["warmup"]


def run_label(config: dict) -> str:
    """What tells a run from its twin."""
    return f"{config['model']['norm']['kind']}-{config['model']['placement']}"


def read_metrics(path: Path) -> list[dict]:
    """Records of a metrics.jsonl; a last line that a killed writer tore off is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def _column(records: list[dict], key: str) -> np.ndarray:
    return np.array([np.nan if r.get(key) is None else r[key] for r in records], dtype=float)


def load_run(folder: Path) -> RunRecord:
    """Reads FOLDER/config.yaml and metrics.jsonl; FileNotFoundError where the folder holds no run."""
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    records = read_metrics(folder / "metrics.jsonl")
    trained = [r for r in records if "train/loss" in r]
    evaluated = [r for r in records if "val/loss" in r]
    return RunRecord(
        folder=folder,
        config=config,
        step=_column(trained, "step").astype(int),
        loss=_column(trained, "train/loss"),
        step_ms=_column(trained, "time/step_ms"),
        val_step=_column(evaluated, "step").astype(int),
        val_loss=_column(evaluated, "val/loss"),
        val_bpb=_column(evaluated, "val/bpb"),
    )


def summarize(run: RunRecord) -> dict:
    """Final losses, bits per byte and step times of one run; None for what was not measured."""
    tail = run.loss[-max(1, round(FINAL_SHARE * len(run.loss))) :]
    times = run.step_ms[np.isfinite(run.step_ms)]
    p10, median, p90 = np.percentile(times, [10, 50, 90]) if len(times) else [None] * 3
    evaluated = (
        len(run.val_step) and len(run.step) and run.val_step[-1] == run.step[-1]
    )  # else it is an earlier model's
    return {
        "label": run.label,
        "step": int(run.step[-1]) if len(run.step) else 0,
        "train/loss": float(tail.mean()) if len(tail) else None,
        "val/loss": float(run.val_loss[-1]) if evaluated else None,
        "val/bpb": float(run.val_bpb[-1]) if evaluated else None,
        "time/step_ms": median,
        "time/step_ms_p10": p10,
        "time/step_ms_p90": p90,
        "time/tokens_per_s": run.tokens_per_step / median * 1e3 if median else None,
    }
