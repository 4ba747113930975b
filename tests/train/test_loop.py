"""The loop: the same command gives the same bits, alone or beside a twin, and records what it says it records."""

import itertools
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from errors import UserError
from kernels.cpu import CannotBuild
from model.gpt import GPT
from tests.train.runs import COMPILED, MODES, metrics, run, same, weights
from training import checkpoint
from training.device import settle
from training.run import Run
from training.schedule import lr_at
from training.timing import WARMUP_STEPS, core_waits


@pytest.mark.parametrize("mode", MODES)
def test_the_same_command_gives_the_same_metrics(small, mode):
    torch.set_num_threads(2)  # where sums could be split in another order
    overrides = [f"compile={mode}", "train.steps=6", "model.dropout=0.1", "train.accumulate=2"]
    a, b = (run(small(*overrides, f"name={name}")) for name in "ab")
    assert metrics(a) == metrics(b)
    assert same(weights(a, 6), weights(b, 6))


@COMPILED
def test_compiled_losses_are_those_of_eager(small):
    a, *others = (run(small(f"compile={mode}", "train.steps=3", f"name={mode}")) for mode in ("eager", "block", "full"))
    for b in others:
        for x, y in zip(metrics(a), metrics(b), strict=True):
            assert x == pytest.approx(y, rel=1e-4)
        assert weights(a, 3).keys() == weights(b, 3).keys()


@COMPILED
@pytest.mark.parametrize(("what", "graphs"), [("full", 1), ("block", 2)])
def test_a_compiled_run_is_compiled_once_and_whole(small, monkeypatch, what, graphs):
    """The first block is given no branch to add, so that blocks have two graphs, however many they are."""
    counted = torch._dynamo.utils.counters
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)  # at a run's end it clears the counts too
    torch._dynamo.reset()
    counted.clear()
    rest = ["train.steps=50", "train.eval_every=7", "train.eval_tokens=500", "train.accumulate=2"]
    run(small(f"compile={what}", "model.n_layer=3", "train.sample_chars=40", *rest))
    assert counted["stats"]["unique_graphs"] == graphs  # a recompilation would be another
    assert not counted["graph_break"]
    torch._dynamo.reset()


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize(("kernels", "overrides"), [("triton", ["train.steps=3", "model.n_layer=1"]), ("cpu", [])])
def test_kernels_give_the_losses_of_torchs(small, kernels, overrides, norm):
    both = (run(small(f"norm={norm}", f"kernels={k}", f"name={k}", *overrides)) for k in (kernels, "torch"))
    losses = [[r["train/loss"] for r in metrics(folder) if "train/loss" in r] for folder in both]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize(
    ("overrides", "chosen"), [([], "cpu"), (["compile=full"], "torch"), (["dtype=bfloat16"], "torch")]
)
def test_kernels_are_the_fastest_that_can_be_had(small, overrides, chosen):
    cfg = small(*overrides)
    settle(cfg)
    assert cfg.kernels == chosen


def test_without_a_c_compiler_torchs_operators_serve(small, monkeypatch):
    def fail():
        raise CannotBuild("there is no C compiler cc")

    monkeypatch.setattr("training.device.library", fail)
    cfg = small()
    settle(cfg)
    assert cfg.kernels == "torch"
    with pytest.raises(UserError, match="kernels=cpu cannot be had: there is no C compiler cc; choose kernels=torch"):
        settle(small("kernels=cpu"))


@pytest.mark.parametrize(("override", "why"), [("compile=full", "kernels of its own"), ("dtype=bfloat16", "float32")])
def test_c_kernels_are_refused_where_they_would_not_serve(small, override, why):
    with pytest.raises(UserError, match=why):
        settle(small("kernels=cpu", override))


@pytest.mark.parametrize(
    ("mode", "why"), [("reduce-overhed", "near names: reduce-overhead"), ("reduce-overhead", "is for device=cuda")]
)
def test_modes_of_torch_compile_are_checked(small, mode, why):
    with pytest.raises(UserError, match=why):
        settle(small("compile=full", f"compile_mode={mode}"))


def test_bfloat16_rounds_and_float32_does_not(small):
    a, b = (run(small(f"dtype={d}", "train.steps=3", f"name={d}")) for d in ("float32", "bfloat16"))
    for x, y in zip(metrics(a), metrics(b), strict=True):
        for key in {"train/loss", "val/loss"} & x.keys():
            assert x[key] == pytest.approx(y[key], rel=0.01)
            assert x[key] != y[key]
    assert all(t.dtype == torch.float32 for t in weights(b, 3).values())


def test_accumulated_micro_batches_equal_the_whole_batch(small):
    a, b = (run(small(f"train.accumulate={n}", "train.steps=3", f"name={n}")) for n in (1, 4))
    for x, y in zip(metrics(a), metrics(b), strict=True):
        assert x == pytest.approx(y, rel=1e-5)


def test_schedule_and_decay_are_those_of_the_configuration(small):
    cosine, linear, undecayed = (
        run(small("train.steps=12", f"name={i}", *o))
        for i, o in enumerate([[], ["optim.schedule=linear"], ["optim.weight_decay=0"]])
    )
    lr = [[r["train/lr"] for r in metrics(f) if "train/lr" in r] for f in (cosine, linear)]
    assert lr[1] == pytest.approx(
        [lr_at(s, peak=1e-3, floor=1e-4, warmup=4, total=12, shape="linear") for s in range(12)]
    )
    assert lr[0] != lr[1]
    assert not same(weights(cosine, 12), weights(undecayed, 12))


def test_evaluation_covers_the_whole_split_and_does_not_depend_on_the_batch(small):
    a, b = (
        run(
            small("train.eval_tokens=null", "train.steps=1", "train.batch_size=8", f"train.accumulate={n}", f"name={n}")
        )
        for n in (1, 8)
    )
    values = [metrics(f)[0] for f in (a, b)]
    assert values[0]["val/loss"] == pytest.approx(values[1]["val/loss"], rel=1e-6)
    assert values[0]["val/bpb"] == pytest.approx(values[0]["val/loss"] / math.log(2))  # one byte a token


def test_bits_per_byte_counts_bytes_not_tokens(small, tmp_path):
    text = tmp_path / "greek.txt"
    text.write_text("αβγδε, and ζηθ — " * 200, encoding="utf-8")
    cfg = small("data.tokenizer=char", f"data.path={text}", "train.steps=1", "train.eval_tokens=null")
    record = metrics(run(cfg))[-1]
    characters = text.read_text(encoding="utf-8")
    validation = characters[int(len(characters) * 0.9) :][1:]  # the first has no prediction
    bits = record["val/loss"] * len(validation) / math.log(2)
    assert record["val/bpb"] == pytest.approx(bits / len(validation.encode()))


def test_step_times_hold_no_evaluation(small, monkeypatch):
    clock, whole = [0.0], Run.evaluate

    def tick() -> float:
        clock[0] += 0.001
        return clock[0]

    def slow(self, *args):
        clock[0] += 1000
        return whole(self, *args)

    monkeypatch.setattr(time, "perf_counter", tick)
    monkeypatch.setattr(Run, "evaluate", slow)
    folder = run(small("train.eval_every=1", "train.steps=16"))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = [r for r in records if "time/step_ms" in r]
    assert [r["step"] for r in timed] == list(range(WARMUP_STEPS + 1, 17))
    assert all(r["time/step_ms"] < 1000 for r in timed)
    assert all("time/warmup_ms" in r for r in records if "train/loss" in r and r not in timed)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="only Linux tells how long threads wait")
def test_steps_tell_how_long_a_thread_had_no_core(small, monkeypatch):
    calls = itertools.count()
    monkeypatch.setattr("training.run.now", lambda device: next(calls) * 2.0)  # a step takes 2 seconds
    monkeypatch.setattr("training.run.core_waits", lambda device: {"1": next(waits), "2": 0.0})
    waits = itertools.count(0.0, 0.5)
    records = [json.loads(line) for line in (run(small()) / "metrics.jsonl").read_text().splitlines()]
    shares = [r["time/wait_share"] for r in records if "time/wait_share" in r]
    assert shares == [0.25] * (20 - WARMUP_STEPS)


def test_a_crowded_machine_is_told_of_once_and_with_its_cure(small, monkeypatch, capsys):
    for shares, told in [(itertools.repeat(0.0), 0), (itertools.count(0.0, 0.5), 1)]:
        monkeypatch.setattr("training.run.core_waits", lambda device, waits=shares: {"1": next(waits)})
        run(small("train.steps=150", "train.log_every=10", f"name=told{told}"))
        said = capsys.readouterr().err
        assert said.count("another process has the cores") == said.count("OMP_NUM_THREADS=") == told


def test_memory_is_kept_for_the_next_step(small, monkeypatch):
    kept = []
    monkeypatch.setattr("train.keep_freed_memory", lambda: kept.append(True))
    run(small("train.steps=1"))
    assert kept == [True]


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="only Linux tells how long threads wait")
def test_a_thread_that_has_no_core_waits():
    device, cores = torch.device("cpu"), os.sched_getaffinity(0)
    before = sum(core_waits(device).values())
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for pid in (0, other.pid):  # both on one core
            os.sched_setaffinity(pid, {min(cores)})
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            pass
    finally:
        os.sched_setaffinity(0, cores)
        other.kill()
        other.wait()
    assert sum(core_waits(device).values()) - before > 0.1
    assert core_waits(torch.device("meta")) == {}


def test_mfu_is_the_share_of_a_known_peak_and_absent_for_an_unknown_one(small, monkeypatch):
    assert not any("time/mfu" in line for line in (run(small("name=a")) / "metrics.jsonl").read_text().splitlines())
    monkeypatch.setattr("training.run.peak_flops", lambda device, dtype: 1e12)
    cfg = small("name=b")
    records = [json.loads(line) for line in (run(cfg) / "metrics.jsonl").read_text().splitlines()]
    model = GPT(cfg.model, 257)
    for r in records:
        if "time/mfu" in r:
            assert r["time/mfu"] == pytest.approx(model.flops_per_token() * 4 * 32 / (r["time/step_ms"] / 1e3) / 1e12)
    assert any("time/mfu" in r for r in records)


def test_the_best_weights_are_kept_apart(small, monkeypatch):
    losses = iter([2.0, 1.5, 1.9])
    whole = Run.keep_best
    monkeypatch.setattr(Run, "keep_best", lambda self, step, loss: whole(self, step, next(losses)))
    folder = run(small())
    state = json.loads((folder / "checkpoints" / "best" / "state.json").read_text())
    assert (state["step"], state["val_loss"]) == (10, 1.5)
    assert checkpoint.steps_saved(folder / "checkpoints") == [20]
