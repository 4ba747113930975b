"""What tests of train.py share: how they run it, and what they read of a run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train as program
from configs.schema import Config
from training import checkpoint

TIMES = ("time/", "compare/step_time_ratio")
COMPILED = pytest.mark.xdist_group("compiled")  # one worker and its cache: no graph is compiled twice
MODES = ["eager", pytest.param("block", marks=COMPILED), pytest.param("full", marks=COMPILED)]


def metrics(folder: Path) -> list[dict]:
    """Everything recorded but times."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith(TIMES)} for r in records]


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    saved = checkpoint.step_folder(folder / "checkpoints", step)
    return load_file(saved / "model.safetensors") | load_file(saved / "optim.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def run(cfg: Config, *twin: Config) -> Path:
    program.train([cfg, *twin])
    return Path(cfg.runs_dir) / cfg.name


def twin_of(cfg: Config, other: Config) -> Config:
    return replace(other, name=f"{cfg.name}-twin")
