"""W&B: its own reader finds what metrics.jsonl says, and nothing waits for a network."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT
from tests.train.runs import metrics, run, twin_of


def test_wandb_offline_is_read_by_wandbs_own_reader(small, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    cfg = small("norm=rmsnorm")
    folder = run(cfg, twin_of(cfg, small()))
    for f in (folder, folder.with_name("run-twin")):
        (log,) = f.glob("wandb/offline-run-*/*.wandb")
        leet = [Path(sys.executable).parent / "wandb", "leet", "inspect", "--json", log]
        out = subprocess.run(leet, capture_output=True, text=True, check=True).stdout
        records = [json.loads(line) for line in out.splitlines()]
        history = [r["history"]["item"] for r in records if r["type"] == "history"]
        assert [r["train/loss"] for r in history if "train/loss" in r] == [
            r["train/loss"] for r in metrics(f) if "train/loss" in r
        ]
        names = set().union(*history)
        assert names >= {"train/loss", "train/grad_norm", "train/lr", "val/loss", "val/bpb", "step", "tokens"}
        assert names >= {"time/step_ms", "time/tokens_per_s", "time/data_ms", "time/eval_ms"}
        shown = subprocess.run([*leet, "--summary"], capture_output=True, text=True, check=True).stdout
        summary = json.loads((f / "summary.json").read_text())
        measured = {k: v for k, v in summary.items() if v is not None}
        assert {k: json.loads(shown)["summary"][k] for k in measured} == pytest.approx(measured)
        config = next(r["run"]["config"]["update"] for r in records if r["type"] == "run")
        saved = yaml.safe_load((f / "config.yaml").read_text())
        assert {k: config[k] for k in saved if k not in ("model", "optim", "train")} == {
            k: saved[k] for k in saved if k not in ("model", "optim", "train")
        }
        assert config["model"]["norm"]["kind"] == saved["model"]["norm"]["kind"]


def test_a_run_without_network_or_key_neither_prompts_nor_stalls(tmp_path, overrides):
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    env |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    args = [o for o in overrides if not o.startswith(("against", "train.steps"))] + ["train.steps=5"]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "train.py", *args], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 60
    assert list((tmp_path / "runs" / "run" / "wandb").glob("offline-run-*"))


def test_an_unreachable_wandb_costs_seconds_and_one_line(tmp_path, overrides):
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    env |= {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    args = [o for o in overrides if not o.startswith("train.steps")] + ["train.steps=5"]
    done = subprocess.run([sys.executable, "train.py", *args], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("out of reach") == 1  # both twins learn of it once
    for name in ("run", "run-layernorm"):
        assert list((tmp_path / "runs" / name / "wandb").glob("offline-run-*"))
