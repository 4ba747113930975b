"""Reading run folders back, torn lines included."""

import json

import numpy as np
import pytest

from compare.comparison import compare
from compare.report import console, shown, summary_table
from errors import UserError
from records import load_run, summarize
from tests.compare.fake_runs import config, write_run


@pytest.fixture
def folder(tmp_path):
    """Ten steps, the first three of which warm up, and the line that a killed writer tore."""
    cfg = config("rmsnorm", train__batch_size=2, model__block_size=5, optim__warmup=1)
    write_run(tmp_path, cfg, np.ones(1))
    records = [{"step": 0, "val/loss": 3.0, "val/bpb": 4.0}]
    records += [
        {"step": s, "train/loss": 3.0 - s / 10, ("time/warmup_ms" if s < 4 else "time/step_ms"): 10.0 * s}
        for s in range(1, 11)
    ]
    records += [{"step": 10, "val/loss": 2.0, "val/bpb": 2.5}, {"step": 10, "compare/gap": 0.1}]
    text = "\n".join(json.dumps(r) for r in records)
    (tmp_path / "metrics.jsonl").write_text(text + '\n{"step": 11, "train/lo')
    return tmp_path


def test_load_and_summarize(folder):
    run = load_run(folder)
    assert run.step.tolist() == list(range(1, 11))
    assert np.isnan(run.step_ms[:3]).all()
    assert run.val_step.tolist() == [0, 10]
    assert run.damage == "lacks its last line, which is torn"
    assert run.seconds.tolist() == pytest.approx(np.cumsum([70] * 3 + [*range(40, 101, 10)]) / 1e3)
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
    run = load_run(folder)
    assert np.isnan(run.loss[0])
    assert run.diverged_at == 1


def test_nothing_recorded(folder):
    (folder / "metrics.jsonl").unlink()
    summary = summarize(load_run(folder))
    assert summary["step"] == 0
    assert {v for k, v in summary.items() if k not in ("step", "label")} == {None}


@pytest.mark.parametrize("damage", ["{", "null", "[1]", '{"train/loss": 1.0}', "\x00\x00"])
def test_curves_end_at_a_damaged_line_and_it_is_said(folder, damage):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([*lines[:6], damage, *lines[6:]]))
    run = load_run(folder)
    assert run.last_step == 5
    assert run.damage == "cannot be read from line 7 on: it ends there"
    other = write_run(folder / "other", config(), np.ones(20))
    assert any("cannot be read from line 7 on" in note for note in compare([run, load_run(other)])["notes"])


def test_no_run(tmp_path):
    with pytest.raises(UserError, match=r"is no run: it has no config\.yaml"):
        load_run(tmp_path / "missing")
    write_run(tmp_path / "one", config(), np.ones(3))
    with pytest.raises(UserError, match=r"no config\.yaml; runs in it: one"):
        load_run(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "a: 1", "- 1", "model: 3", "\xff"])
def test_a_damaged_configuration_is_said_to_be(folder, content):
    (folder / "config.yaml").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=r"config\.yaml is damaged"):
        load_run(folder)


@pytest.mark.parametrize("name", ["environment.json", "summary.json"])
@pytest.mark.parametrize("content", ["", "{", "null"])
def test_a_damaged_record_is_an_absent_one(folder, name, content):
    (folder / name).write_text(content)
    run = load_run(folder)
    assert getattr(run, name.removesuffix(".json")) == {}
    assert run.settings["optim.lr"] == 1e-3


def test_the_printed_words(folder, capsys):
    summary = summarize(load_run(folder)) | {"peak_memory_mib": None, "process_peak_mib": 512.4}
    console().print(summary_table([summary] * 2))
    out = capsys.readouterr().out
    for words in ("2.0000", "peak memory of the process (MiB)", "512"):
        assert words in out
    assert "peak memory (MiB)" not in out
    (folder / "summary.json").write_text(json.dumps(summary))
    other = write_run(
        folder / "other", config(train__batch_size=2, model__block_size=5, optim__warmup=1), np.full(20, 2.0)
    )
    console().print(shown(compare([load_run(other), load_run(folder)])))
    out = capsys.readouterr().out
    for words in ("rmsnorm-pre minus layernorm-pre", "no interval under 250 steps", "not measured"):
        assert words in out
