"""Reading run folders back, torn lines included."""

import json

import numpy as np
import pytest
import yaml

from compare.report import compare_pair, comparison_sentences, print_summary
from compare.runs import load_run, read_metrics, summarize

CONFIG = {
    "train": {"batch_size": 2},
    "model": {"block_size": 5, "norm": {"kind": "rmsnorm"}, "placement": "pre"},
    "optim": {"warmup": 1},
    "compare": {"tolerance": 0.02},
}


@pytest.fixture
def folder(tmp_path):
    records = [{"step": 0, "val/loss": 3.0, "val/bpb": 4.0}]
    records += [
        {"step": s, "train/loss": 3.0 - s / 10, ("time/warmup_ms" if s < 4 else "time/step_ms"): 10.0 * s}
        for s in range(1, 11)
    ]
    records += [{"step": 10, "val/loss": 2.0, "val/bpb": 2.5}, {"step": 10, "compare/gap": 0.1}]
    text = "\n".join(json.dumps(r) for r in records)
    (tmp_path / "metrics.jsonl").write_text(text + '\n{"step": 11, "train/lo')
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    return tmp_path


def test_load_and_summarize(folder):
    run = load_run(folder)
    assert run.step.tolist() == list(range(1, 11))
    assert np.isnan(run.step_ms[:3]).all()
    assert run.val_step.tolist() == [0, 10]
    summary = summarize(run)
    assert summary["train/loss"] == pytest.approx(2.0)
    assert (summary["val/loss"], summary["val/bpb"], summary["step"]) == (2.0, 2.5, 10)
    assert summary["time/step_ms"] == 70.0
    assert summary["time/tokens_per_s"] == pytest.approx(10 / 0.07)


def test_the_validation_loss_of_an_earlier_step_is_not_the_final_one(folder):
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "train/loss": 3.0}\n{"step": 1, "val/loss": 2.0, "val/bpb": 2.5}\n{"step": 2, "train/loss": 2.9}\n'
    )
    summary = summarize(load_run(folder))
    assert (summary["step"], summary["val/loss"], summary["val/bpb"]) == (2, None, None)


def test_a_diverged_loss_is_nan(folder):
    (folder / "metrics.jsonl").write_text('{"step": 1, "train/loss": null}\n')
    assert np.isnan(load_run(folder).loss[0])


def test_nothing_recorded(folder):
    (folder / "metrics.jsonl").unlink()
    assert read_metrics(folder / "metrics.jsonl") == []
    summary = summarize(load_run(folder))
    assert summary["step"] == 0
    assert {v for k, v in summary.items() if k not in ("step", "label")} == {None}


def test_no_run(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_run(tmp_path)


def test_the_printed_words(folder, capsys):
    run = load_run(folder)
    summary = summarize(run) | {"peak_memory_mib": None, "process_peak_mib": 512.4}
    comparison = compare_pair(run, run)
    assert json.loads(json.dumps(comparison)) == comparison
    assert comparison["gap"] == {"gap": 0.0, "interval": None, "gap_abs": 0.0, "overlap": 1.0, "n_steps": 9}
    print_summary([summary] * 2, comparison_sentences(comparison), {"b": "text"}, ["runs/b"])
    out = capsys.readouterr().out
    expected = [
        "2.0000",
        "peak memory of the process (MiB)",
        "512",
        "+0.0000 nats/token (too few steps",
        "No seed noise measured",
        "not measured: too few timed",
    ]
    for words in (*expected, "rmsnorm-pre minus rmsnorm-pre", "b writes:\ntext", "runs: runs/b"):
        assert words in out


def test_intervals_and_ratio_are_printed():
    gap = {"gap": -0.0021, "interval": (-0.004, 0.0002), "gap_abs": 0.01, "overlap": 0.9, "n_steps": 700}
    comparison = {"candidate": "b", "baseline": "a", "tolerance": 0.02, "gap": gap}
    lines = comparison_sentences(comparison | {"step_time_ratio": {"median": 0.987, "interval": (0.98, 0.99)}})
    assert any("-0.0021 nats/token (95 % -0.0040 to +0.0002)" in line for line in lines)
    assert any("0.987 (95 % 0.980 to 0.990)" in line for line in lines)
    nothing = comparison_sentences(comparison | {"gap": None, "step_time_ratio": None})
    assert any("no step after" in line for line in nothing)
