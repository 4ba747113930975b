"""Two runs in lockstep: the same batches and initial weights, and the numbers that each would have alone."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import train as program
from errors import UserError
from tests.train.runs import metrics, run, same, twin_of, weights
from training import checkpoint
from training.run import Diverged, Run


def test_twins_share_batches_and_initial_weights_and_equal_their_lone_runs(small):
    cfg, other = small("norm=rmsnorm", "name=a"), small("norm=layernorm", "name=b")
    together = run(cfg, twin_of(cfg, other))
    beside = together.with_name("a-twin")
    alone = run(small("norm=rmsnorm", "name=alone"))
    ours = [{k: v for k, v in r.items() if not k.startswith("compare/")} for r in metrics(together)]
    assert [r for r in ours if len(r) > 2] == metrics(alone)
    assert same(weights(together, 20), weights(alone, 20))
    assert metrics(beside) == metrics(run(small("norm=layernorm", "name=b")))
    hashes = [json.loads((f / "environment.json").read_text())["batch_hashes"] for f in (together, beside, alone)]
    assert hashes[0].keys() == {"0", "1", "100"}
    assert hashes[0] == hashes[1] == hashes[2]


def test_neither_twin_always_goes_first(small, monkeypatch):
    order, whole = [], Run.step

    def noted(self, *args):
        order.append(self.cfg.name)
        return whole(self, *args)

    monkeypatch.setattr(Run, "step", noted)
    cfg = small("norm=rmsnorm", "name=a", "train.steps=4")
    run(cfg, replace(small("train.steps=4"), name="b"))
    assert "".join(order) == "abbaabba"


def test_compare_metrics_are_those_of_the_recorded_curves(small):
    cfg = small("norm=rmsnorm")
    folder = run(cfg, twin_of(cfg, small("norm=layernorm")))
    loss = [
        np.array([r["train/loss"] for r in metrics(f) if "train/loss" in r])
        for f in (folder, folder.with_name("run-twin"))
    ]
    d = (loss[0] - loss[1])[cfg.optim.warmup :]
    last = [r for r in metrics(folder) if "compare/gap" in r][-1]
    assert last["step"] == 20
    assert last["compare/gap"] == pytest.approx(d[len(d) // 2 :].mean())
    assert last["compare/gap_abs"] == pytest.approx(np.abs(d).mean())
    assert last["compare/overlap"] == np.mean(np.abs(d) <= 0.02)


def test_a_twin_that_did_not_diverge_is_not_said_to(small, monkeypatch):
    cfg, other = small("name=a", "norm=rmsnorm"), small("name=b", "optim.lr=1e30", "optim.warmup=0")
    with pytest.raises(Diverged, match="layernorm-pre diverged"):
        program.train([cfg, other])
    statuses = [json.loads((Path(cfg.runs_dir) / n / "summary.json").read_text())["status"] for n in "ab"]
    assert statuses == ["interrupted", "diverged"]


def test_twins_resume_together(small):
    def pair(name, *overrides):
        cfg = small("norm=rmsnorm", f"name={name}", *overrides)
        return cfg, twin_of(cfg, small("norm=layernorm", *overrides))

    straight = run(*pair("straight"))
    run(*pair("resumed", "train.stop_at=10"))
    resumed = run(*pair("resumed", "resume=true"))
    assert metrics(straight) == metrics(resumed)
    assert any("compare/gap" in r for r in metrics(straight))


def test_twins_go_on_from_the_last_step_that_both_have(small):
    def pair(name, *overrides):
        cfg, other = (
            small(f"norm={n}", f"name={name}", "checkpoint.every=5", *overrides) for n in ("rmsnorm", "layernorm")
        )
        return cfg, twin_of(cfg, other)

    straight = run(*pair("straight"))
    folder = run(*pair("resumed", "train.stop_at=10"))
    twin = folder.with_name("resumed-twin") / "checkpoints"
    shutil.rmtree(checkpoint.step_folder(twin, 10))  # killed between the saves of the two
    run(*pair("resumed", "resume=true"))
    assert metrics(folder) == metrics(straight)
    assert same(weights(folder, 20), weights(straight, 20))
    shutil.rmtree(twin)
    (folder / "summary.json").unlink()
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="no whole checkpoint of one step"):
        program.train([*pair("resumed", "resume=true")])
    assert (folder / "metrics.jsonl").read_bytes() == before
