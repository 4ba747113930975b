"""Divergence, a full disk, signals and torchrun: nothing is lost, and what to do next is said."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train as program
import training.run
from tests.conftest import ROOT
from tests.train.runs import metrics, run, weights
from training import checkpoint
from training.run import Diverged, Run
from training.schedule import lr_at


def test_divergence_stops_the_run_and_never_reaches_the_weights(small):
    cfg = small("optim.lr=1e30", "optim.warmup=0", "train.log_every=20", "checkpoint.every=1", "checkpoint.keep=20")
    with pytest.raises(Diverged, match=r"diverged at step \d+: loss .* learning rate .*step_0") as e:
        program.train([cfg])
    folder = Path(cfg.runs_dir) / "run"
    steps = checkpoint.steps_saved(folder / "checkpoints")
    assert f"step {steps[-1] + 1}" in str(e.value)
    assert all(torch.isfinite(t).all() for t in weights(folder, steps[-1]).values())
    summary = (folder / "summary.json").read_text()
    assert json.loads(summary, parse_constant=pytest.fail)["status"] == "diverged"
    last = [r for r in metrics(folder) if "train/loss" in r][-1]
    assert None in (last["train/loss"], last["train/grad_norm"])


def test_nothing_is_recorded_after_the_step_that_diverged(small, monkeypatch):
    update = training.run.guarded_update

    def bad_once(optimizer, *, loss, lr, **rest):
        if lr == pytest.approx(lr_at(6, peak=1e-3, floor=1e-4, warmup=4, total=20)):
            loss.fill_(math.nan)
        return update(optimizer, loss=loss, lr=lr, **rest)

    monkeypatch.setattr(training.run, "guarded_update", bad_once)
    cfg = small("train.log_every=20", "train.eval_every=20")
    with pytest.raises(Diverged, match="diverged at step 7"):
        program.train([cfg])
    assert [r["step"] for r in metrics(Path(cfg.runs_dir) / "run") if "train/loss" in r] == list(range(1, 8))


@pytest.fixture
def one_spike(monkeypatch):
    """Step 71 has a gradient a thousand times as large as it was."""
    update = training.run.guarded_update

    def spiked(optimizer, *, lr, **rest):
        if lr == lr_at(70, peak=1e-3, floor=1e-4, warmup=4, total=80):
            for p in optimizer.params:
                p.grad *= 1e3
        return update(optimizer, lr=lr, **rest)

    monkeypatch.setattr(training.run, "guarded_update", spiked)


def test_a_spike_is_left_out_where_asked(small, one_spike):
    overrides = ["train.steps=80", "train.on_spike=skip"]
    straight = run(small(*overrides, "name=straight"))
    assert [r["step"] for r in metrics(straight) if r.get("train/spike")] == [71]
    assert weights(straight, 80)["embedding.weight.step"] == 79
    run(small(*overrides, "train.stop_at=70"))
    assert metrics(run(small(*overrides, "resume=true"))) == metrics(straight)


@pytest.mark.parametrize(("before", "after"), [("ignore", "skip"), ("skip", "ignore")])
def test_watching_for_spikes_may_begin_or_end_at_a_resumption(small, one_spike, before, after):
    run(small("train.steps=80", f"train.on_spike={before}", "train.stop_at=60"))
    folder = run(small("train.steps=80", f"train.on_spike={after}", "resume=true", "force=true"))
    assert weights(folder, 80)["embedding.weight.step"] == 80  # too few steps were seen to tell one


def test_a_spike_ends_the_run_where_asked(small, one_spike):
    cfg = small("train.steps=80", "train.on_spike=stop", "train.log_every=80", "checkpoint.every=70")
    with pytest.raises(Diverged, match=r"spiked at step 71: .*step_00000070"):
        program.train([cfg])
    folder = Path(cfg.runs_dir) / "run"
    assert [r["step"] for r in metrics(folder) if "train/loss" in r][-1] == 71


def test_no_space_left_names_the_file_and_keeps_what_was_saved(small, monkeypatch):
    cfg = small("checkpoint.every=5")
    whole = checkpoint.serialize_file

    def full(named, path, notes):
        if "00000015" in str(path):
            raise OSError(28, os.strerror(28), str(path))
        whole(named, path, notes)

    monkeypatch.setattr(checkpoint, "serialize_file", full)
    with pytest.raises(OSError, match="No space left"):
        program.train([cfg])
    folder = Path(cfg.runs_dir) / "run"
    assert checkpoint.steps_saved(folder / "checkpoints") == [5, 10]
    assert not list(folder.glob("checkpoints/.*"))
    monkeypatch.undo()
    os.environ["WANDB_MODE"] = "disabled"
    run(small("checkpoint.every=5", "resume=true"))
    assert metrics(folder) == metrics(run(small("name=straight", "checkpoint.every=5")))


def test_a_signal_in_the_last_evaluation_ends_the_process_after_it(small, monkeypatch):
    whole = Run.evaluate

    def interrupted(self, step, *args):
        if step == 20:
            os.kill(os.getpid(), signal.SIGINT)
        return whole(self, step, *args)

    monkeypatch.setattr(Run, "evaluate", interrupted)
    cfg = small()
    with pytest.raises(SystemExit) as e:
        program.train([cfg])
    assert e.value.code == 130
    assert json.loads((Path(cfg.runs_dir) / "run" / "summary.json").read_text())["status"] == "finished"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75)])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, overrides, number, status, train_py):
    process = subprocess.Popen([sys.executable, "train.py", *overrides], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.startswith("step 20/"):
            break
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert "Traceback" not in err
    line = err.strip().splitlines()[-1].strip()
    assert line.startswith("python train.py")
    assert line.endswith("resume=true")
    folder = tmp_path / "runs" / "run"
    (stopped,) = checkpoint.steps_saved(folder / "checkpoints")
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    again = train_py(*line.split()[2:], f"train.stop_at={stopped + 5}")
    assert again.returncode == 0, again.stderr
    steps = [r["step"] for r in metrics(folder) if "train/loss" in r]
    assert steps == list(range(1, stopped + 6))


def test_ctrl_c_ends_a_sweep(tmp_path, overrides):
    args = ["-m", "seed=1,2,3", *(o for o in overrides if not o.startswith("name="))]
    process = subprocess.Popen(
        [sys.executable, "train.py", *args], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    for line in process.stderr:
        if line.startswith("step 5/"):
            break
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(list((tmp_path / "runs").glob("*/config.yaml"))) == 2  # one job's twins
