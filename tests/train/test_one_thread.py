"""What twins do whose steps another process disturbed: more of them by one thread, in CPU time."""

import itertools
import json
import os
import signal
import time

import pytest
import torch

import train as program
from data.tokens import open_tokens
from tests.train.runs import metrics, run, same, twin_of
from training import one_thread
from training.run import Run

STEPS = one_thread.WARMUP + one_thread.STEPS


def let_steps_wait(monkeypatch, seconds: float) -> None:
    """Whatever else the machine does, every step waits for a core so long."""
    waits = itertools.count(0.0, seconds)
    monkeypatch.setattr("training.run.core_waits", lambda device: {"1": next(waits)})


@pytest.fixture
def crowded(monkeypatch):
    let_steps_wait(monkeypatch, 10.0)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def pair(small, *overrides) -> list:
    cfg = small("norm=rmsnorm", "train.steps=111", "compare.report=true", *overrides)
    return [cfg, twin_of(cfg, small("norm=layernorm", "train.steps=111", *overrides))]


def test_crowded_twins_have_a_ratio_by_one_thread(small, crowded, two_threads, monkeypatch, capsys):
    threads, whole = [], Run.ms_by

    def noted(self, *args):
        threads.append(torch.get_num_threads())
        return whole(self, *args)

    monkeypatch.setattr(Run, "ms_by", noted)
    folder = run(*pair(small))
    written = [json.loads((f / "one_thread.json").read_text()) for f in (folder, folder.with_name("run-twin"))]
    assert [len(w["step_ms"]) for w in written] == [one_thread.STEPS] * 2
    assert threads == [1] * 2 * STEPS
    assert torch.get_num_threads() == 2
    (c,) = json.loads((folder / "compare.json").read_text())["comparisons"]
    assert c["step_time_ratio"]["how"] == "one thread"
    out, err = capsys.readouterr()
    assert "further steps by one thread, interleaved, in CPU time" in out
    assert err.count("by one thread, since another process has the cores") == 1


def test_the_further_steps_change_nothing_of_the_run(small, monkeypatch, tmp_path):
    models, whole = [], Run.sample

    def noted(self, *args):
        models.append({name: p.detach().clone() for name, p in self.model.named_parameters()})
        return whole(self, *args)

    monkeypatch.setattr(Run, "sample", noted)
    dropout = "model.dropout=0.1"
    folders = []
    for seconds in (0.0, 10.0):
        let_steps_wait(monkeypatch, seconds)
        folders.append(run(*pair(small, dropout, f"runs_dir={tmp_path}/{seconds}", "train.sample_chars=5")))
    assert [(folder / "one_thread.json").exists() for folder in folders] == [False, True]
    assert metrics(folders[0]) == metrics(folders[1])
    assert all(same(a, b) for a, b in zip(models[:2], models[2:], strict=True))


@pytest.mark.parametrize("which", ["quiet", "short", "alone"])
def test_other_runs_take_no_further_steps(small, monkeypatch, which):
    let_steps_wait(monkeypatch, 0.0 if which == "quiet" else 10.0)
    configs = pair(small, "train.stop_at=109") if which == "short" else pair(small)
    assert not (run(*configs[: 1 if which == "alone" else 2]) / "one_thread.json").exists()


def test_a_resumed_run_has_none_of_an_earlier_end(small, crowded, monkeypatch):
    folder = run(*pair(small, "train.stop_at=110"))
    assert (folder / "one_thread.json").exists()
    monkeypatch.setattr(program, "needed", lambda runs: False)
    run(*pair(small, "resume=true"))
    assert not (folder / "one_thread.json").exists()


def test_a_signal_ends_them_and_the_run_is_finished(small, crowded, monkeypatch):
    calls, whole = itertools.count(1), Run.ms_by

    def stopped(self, *args):
        if next(calls) == 2 * (one_thread.WARMUP + 3):
            os.kill(os.getpid(), signal.SIGINT)
        return whole(self, *args)

    monkeypatch.setattr(Run, "ms_by", stopped)
    configs = pair(small)
    with pytest.raises(SystemExit) as e:
        program.train(configs)
    assert e.value.code == 130
    folder = program.folder_of(configs[0])
    assert len(json.loads((folder / "one_thread.json").read_text())["step_ms"]) == 3
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
    (c,) = json.loads((folder / "compare.json").read_text())["comparisons"]
    assert (c["step_time_ratio"]["ratio"], c["step_time_ratio"]["why"][:8]) == (None, "too few ")


def test_a_run_that_was_told_to_stop_takes_none(small, crowded, monkeypatch):
    whole = Run.evaluate

    def stopped(self, step, *args):
        if step == 111 and self.label.startswith("rms"):
            os.kill(os.getpid(), signal.SIGINT)
        return whole(self, step, *args)

    monkeypatch.setattr(Run, "evaluate", stopped)
    configs = pair(small)
    with pytest.raises(SystemExit):
        program.train(configs)
    assert not (program.folder_of(configs[0]) / "one_thread.json").exists()


def test_they_end_when_they_take_too_long(small, crowded, monkeypatch):
    monkeypatch.setattr(one_thread, "MOST_SECONDS", 0)
    assert json.loads((run(*pair(small)) / "one_thread.json").read_text()) == {"step_ms": []}


def test_cpu_time_holds_no_waiting_and_the_learning_rate_is_0(small, monkeypatch):
    cfg, rates = small("kernels=torch"), []
    one = Run(cfg, open_tokens(cfg.data, print))
    monkeypatch.setattr(one, "_update", lambda step, x, y, lr: (rates.append(lr), time.sleep(0.2)))
    assert one.ms_by(time.thread_time, 1, None, None) < 50
    assert rates == [0.0]
