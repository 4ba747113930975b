"""What a run, and a sweep, say at the end of how they differ from others."""

import json
from pathlib import Path

import pytest
import yaml

from tests.train.runs import metrics

WRITTEN = {"compare.json", "compare.md", "compare.png", "report.html"}


@pytest.fixture
def words(tmp_path, text_file) -> list[str]:
    return [
        "data=text", f"data.path={text_file}", f"data.cache_dir={tmp_path}/tokens", f"runs_dir={tmp_path}/runs",
        "device=cpu", "model.n_layer=1", "model.n_embd=16", "model.n_head=1", "model.block_size=16", "optim.warmup=2",
        "train.batch_size=2", "train.eval_tokens=64", "train.eval_every=4", "train.sample_chars=0", "train.steps=8",
    ]  # fmt: skip


def compared(folder: Path) -> dict:
    return json.loads((folder / "compare.json").read_text())


def test_a_run_is_compared_with_its_finished_siblings_or_told_how_to_make_one(train_py, words, tmp_path):
    first = train_py(*words, "name=ln")
    assert first.returncode == 0, first.stderr
    assert "no finished sibling" in first.stdout
    (command,) = [line.strip() for line in first.stdout.splitlines() if "python train.py" in line]
    assert command.endswith(" norm=rmsnorm")
    assert "name=ln" not in command
    assert not WRITTEN & {f.name for f in (tmp_path / "runs" / "ln").iterdir()}

    second = train_py(*words, "norm=rmsnorm", "name=rms")
    assert second.returncode == 0, second.stderr
    assert "rmsnorm-pre minus layernorm-pre, on the same batches" in second.stdout
    assert {f.name for f in (tmp_path / "runs" / "rms").iterdir()} >= WRITTEN
    (c,) = compared(tmp_path / "runs" / "rms")["comparisons"]
    assert (c["candidate"], c["n_seeds"], c["paired"]) == ("rmsnorm-pre", [1, 1], True)

    alone = train_py(*words, "norm=rmsnorm", "name=again", "compare.report=false")
    assert "minus" not in alone.stdout
    both = [metrics(tmp_path / "runs" / name) for name in ("rms", "again")]
    assert both[0] == both[1]  # what lies beside a run leaves no trace in its records


def test_the_twin_of_another_seed_is_the_noise(train_py, words, tmp_path):
    done = train_py(*words, "against=seed", "seed=5", "name=run")
    assert done.returncode == 0, done.stderr
    assert "This is noise" in done.stdout
    assert "layernorm-pre, seed=5" in done.stderr
    result = compared(tmp_path / "runs" / "run")
    (c,) = result["comparisons"]
    assert (c["noise"], c["paired"]) == (True, True)
    assert c["differs"] == {"seed": [6, 5]}
    assert c["gap"]["gap_abs"] > 0
    configs = [yaml.safe_load((tmp_path / "runs" / n / "config.yaml").read_text()) for n in ("run", "run-seed")]
    assert [c["data_seed"] for c in configs] == [5, 5]


def test_a_sweep_ends_with_one_comparison_over_its_seeds(train_py, words, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    sweep = ["-m", *words, "norm=rmsnorm", "against=layernorm", "seed=1,2"]
    done = train_py(*sweep)
    assert done.returncode == 0, done.stderr
    assert "over 2 seeds the final validation loss differs" in done.stdout
    (place,) = (tmp_path / "runs").glob("sweep-*")
    assert {f.name for f in place.iterdir()} >= WRITTEN
    result = compared(place)
    (c,) = result["comparisons"]
    assert (c["candidate"], c["baseline"], c["n_seeds"]) == ("rmsnorm-pre", "layernorm-pre", [2, 2])
    assert result["command"].startswith("python train.py -m")
    assert list((tmp_path / "runs").glob("*/report.html")) == [place / "report.html"]
    (log,) = place.glob("wandb/offline-run-*/files/media")
    assert {f.suffix for f in log.rglob("*.*")} == {".png", ".html", ".json"}
    before = (place / "compare.json").read_text()
    again = train_py(*sweep)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("finished before") == 2
    assert json.loads((place / "compare.json").read_text()) == json.loads(before)


def test_a_sweep_says_in_its_comparison_what_diverged_and_what_is_missing(train_py, words, tmp_path):
    words = [w for w in words if not w.startswith("model.block_size")] + ["train.log_every=1", "optim.warmup=0"]
    done = train_py("-m", *words, "optim.lr=1e-3,1e30", "model.block_size=16,100000")
    assert done.returncode == 1
    assert "3 jobs failed" in done.stderr
    (place,) = (tmp_path / "runs").glob("sweep-*")
    result = compared(place)
    assert sum("diverged at step 2" in note for note in result["notes"]) == 1
    assert sum("did not finish" in note and "block_size=100000" in note for note in result["notes"]) == 2
    (c,) = result["comparisons"]
    assert c["verdict"] == "diverged"
    assert "diverged at step" in (place / "compare.md").read_text()
    assert "diverged at step" in (place / "report.html").read_text()
