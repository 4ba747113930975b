"""compile=auto on a CPU: what is chosen, that the answer is kept, and that no norm changes it."""

import json
import os

import pytest
import torch

import train as program
from data.tokens import open_tokens
from model.config import Kernels
from tests.train.runs import run
from training import trial
from training.config import Compile
from training.device import settle
from training.run import Run


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def asked(small, *overrides):
    cfg = small("compile=auto", *overrides)
    settle(cfg)
    return cfg


def answer(small, *overrides, twins=1) -> tuple:
    """The first config and the trial."""
    configs = [asked(small, *overrides) for _ in range(twins)]
    data = open_tokens(configs[0].data, print)
    batches, _ = program.build_batches(configs[0], data)
    found = trial.settle_compile(configs, data, batches)
    assert len({(cfg.compile, cfg.kernels) for cfg in configs}) == 1
    return configs[0], found


@pytest.fixture
def times(monkeypatch):
    """times(eager=ms, full=ms): what steps take, without any being made or compiled. Returns who was timed."""

    def pretend(**ms):
        timed = []

        def ms_by(self, clock, step, x, y):
            timed.append(str(self.cfg.compile))
            return ms[self.cfg.compile]

        monkeypatch.setattr(Run, "ms_by", ms_by)
        return timed

    return pretend


LONG = "train.steps=1000000"


@pytest.mark.parametrize(
    ("overrides", "eager", "full", "chosen"),
    [
        ([], 10.0, 1.0, "eager"),  # 20 steps
        ([LONG], 0.2, 0.1, "eager"),  # 200 s
        ([LONG], 10.0, 8.0, "full"),
        ([LONG], 10.0, 9.6, "eager"),  # within what a trial cannot tell
        ([LONG], 10.0, 20.0, "eager"),
    ],
)
def test_the_sooner_end_is_chosen(small, times, overrides, eager, full, chosen):
    timed = times(eager=eager, full=full)
    cfg, found = answer(small, *overrides, twins=2)
    assert (cfg.compile, found["chosen"]) == (chosen, chosen)
    assert cfg.kernels == {"eager": "cpu", "full": "torch"}[chosen]
    assert ("full" in timed) == (found["full_ms"] is not None) == (eager * cfg.train.steps >= 1e3 * trial.SHORT)
    assert found["why"].count("ms")


def test_compiling_that_takes_longer_than_it_saves_is_not_chosen(small, times, monkeypatch):
    times(eager=10.0, full=8.0)
    clock = iter(range(0, 10**9, 2001))
    monkeypatch.setattr(trial.time, "perf_counter", lambda: next(clock))
    assert answer(small, LONG)[0].compile == "eager"


def test_equal_runs_get_one_answer_whatever_the_times_are_next(small, times):
    times(eager=10.0, full=8.0)
    assert answer(small, LONG)[0].compile == "full"
    timed = times(eager=8.0, full=10.0)
    assert answer(small, LONG, "dtype=bfloat16")[0].compile == "eager"  # another question
    timed.clear()
    for other in ("norm=layernorm", "norm=identity", "placement=post", "seed=3", "model.norm.eps=1e-6"):
        cfg, found = answer(small, LONG, other)
        assert cfg.compile == "full"
        assert "kept in" in found["why"]
    assert not timed
    assert answer(small, LONG, "train.batch_size=8")[0].compile == "eager"  # another question
    assert timed


def test_of_processes_that_try_together_the_first_answers_for_all(small, times, monkeypatch):
    times(eager=10.0, full=8.0)
    looked, calls = trial._remembered, []

    def meanwhile(cfg, vocab_size):
        if not calls:
            calls.append(1)
            times(eager=8.0, full=10.0)
            assert answer(small, LONG)[0].compile == "eager"
            times(eager=10.0, full=8.0)
            return None
        return looked(cfg, vocab_size)

    monkeypatch.setattr(trial, "_remembered", meanwhile)
    assert answer(small, LONG)[0].compile == "eager"


def test_a_kept_answer_that_is_damaged_is_asked_anew(small, times, tmp_path):
    times(eager=10.0, full=8.0)
    answer(small, LONG)
    (kept,) = (tmp_path / "cache").rglob("compile-*.json")
    kept.write_text('{"chosen": "never"')
    times(eager=8.0, full=10.0)
    assert answer(small, LONG)[0].compile == "eager"
    assert json.loads(kept.read_text())["chosen"] == "eager"


def test_where_nothing_can_be_kept_the_answer_holds_for_this_run(small, times, monkeypatch):
    times(eager=10.0, full=8.0)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trial, "write_json", full)
    assert answer(small, LONG)[0].compile == "full"


def test_without_links_the_answer_is_kept_all_the_same(small, times, monkeypatch):
    def none(*args):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(trial.os, "link", none)
    times(eager=10.0, full=8.0)
    answer(small, LONG)
    times(eager=8.0, full=10.0)
    assert answer(small, LONG)[0].compile == "full"


@pytest.mark.parametrize("which", [0, 1])
def test_a_twin_without_a_folder_takes_what_the_other_one_s_says(small, times, which):
    timed = times(eager=10.0, full=8.0)
    configs = [asked(small, LONG), asked(small, LONG)]
    configs[which].compile, configs[which].kernels = Compile.full, Kernels.plain
    data = open_tokens(configs[0].data, print)
    assert trial.settle_compile(configs, data, program.build_batches(configs[0], data)[0]) is None
    assert {(cfg.compile, cfg.kernels) for cfg in configs} == {("full", "plain")}
    assert not timed


def test_what_was_compiled_is_timed_and_let_go(small, monkeypatch):
    """The steps that are timed are those of the code that was compiled, not of a second compilation."""
    events = []

    def ms_by(self, clock, step, x, y):
        events.append(str(self.cfg.compile))
        return 1e6 if events[-1] == "eager" else 1.0

    monkeypatch.setattr(Run, "ms_by", ms_by)
    monkeypatch.setattr(torch.compiler, "reset", lambda: events.append("reset"))
    assert answer(small)[0].compile == "full"
    assert events.index("reset") == len(events) - 1


def test_where_torch_compile_fails_eager_serves(small, times, monkeypatch):
    cache = os.environ["XDG_CACHE_HOME"]
    times(eager=10.0, full=8.0)
    monkeypatch.setattr(
        torch, "compile", lambda *args, **options: (_ for _ in ()).throw(RuntimeError("no g++\nat all"))
    )
    cfg, found = answer(small, LONG)
    assert cfg.compile == "eager"
    assert found["why"] == "torch.compile failed (RuntimeError: no g++)"
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    times(eager=10.0, full=8.0)
    assert answer(small, LONG)[0].compile == "full"  # once there is one


@pytest.mark.parametrize("kernels", ["cpu", "triton"])
def test_kernels_that_cannot_be_compiled_leave_no_choice(small, times, kernels):
    timed = times(eager=10.0, full=8.0)
    cfg, _ = answer(small, LONG, f"kernels={kernels}")
    assert (cfg.compile, cfg.kernels, timed) == ("eager", kernels, [])


def test_weights_and_metrics_are_those_of_the_choice_itself(small, capsys):
    folder = run(small("compile=auto"))
    assert Compile.eager in (folder / "config.yaml").read_text()
    assert "compile=auto chose eager: 20 eager steps of" in capsys.readouterr().err
    assert json.loads((folder / "environment.json").read_text())["compile_trial"]["chosen"] == "eager"
    chosen = run(small("name=chosen"))
    assert program.load_run(folder).loss.tolist() == program.load_run(chosen).loss.tolist()
