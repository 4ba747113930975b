"""A run's folder is its own: an existing one is not touched, a damaged one is said to be, a foreign one left alone."""

import json
from pathlib import Path

import pytest

import train as program
from errors import UserError
from tests.train.runs import metrics, run
from training.folder import claimed
from training.run import Run


def test_an_existing_run_is_not_touched(small):
    folder = run(small("train.steps=2"))
    before = {f: f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    with pytest.raises(UserError, match=r"resume=true .* overwrite=true .* name="):
        program.train([small("train.steps=2")])
    with pytest.raises(UserError, match=r"optim.beta1: 0.9 -> 0.8.*force=true"):
        program.train([small("train.steps=2", "optim.beta1=0.8", "resume=true")])
    assert before == {f: f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    run(small("train.steps=3", "overwrite=true"))
    assert metrics(folder)[-1]["step"] == 3


def test_a_refused_run_leaves_no_folder_and_an_overwritten_one_alone(small):
    folder = run(small("train.steps=2"))
    with pytest.raises(UserError, match="block_size"):
        program.train([small("overwrite=true", "model.block_size=100000")])
    assert metrics(folder)[-1]["step"] == 2
    with pytest.raises(UserError, match="one folder name"):
        program.train([small("name=../other")])


def test_overwrite_touches_nothing_but_a_run(small, tmp_path):
    precious = tmp_path / "runs" / "run" / "thesis.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("years of work")
    for how in ("overwrite=true", "resume=true", "overwrite=false"):
        with pytest.raises(UserError, match="something else than a run"):
            program.train([small(how)])
    assert precious.read_text() == "years of work"
    with pytest.raises(UserError, match="choose one"):
        program.train([small("overwrite=true", "resume=true", "name=other")])


@pytest.mark.parametrize("name", ["config.yaml", "environment.json", "summary.json"])
@pytest.mark.parametrize("content", ["", "{", "null"])
def test_a_damaged_record_is_an_error_or_written_anew(small, name, content):
    folder = run(small("train.steps=3"))
    (folder / name).write_text(content)
    if name == "summary.json":
        run(small("train.steps=3", "resume=true"))
        assert json.loads((folder / name).read_text())["status"] == "finished"
    else:
        with pytest.raises(UserError, match=f"{name} is damaged"):
            program.train([small("train.steps=3", "resume=true")])


def test_a_folder_in_use_is_refused(small):
    cfg = small("resume=true")
    with claimed([Path(cfg.runs_dir) / "run"]), pytest.raises(UserError, match="in use by another process"):
        program.train([cfg])
    run(cfg)


def test_a_folder_made_meanwhile_is_not_shared(small, monkeypatch):
    def slow(cfg, *given):
        (Path(cfg.runs_dir) / cfg.name).mkdir(parents=True)
        return Run(cfg, *given)

    monkeypatch.setattr(program, "Run", slow)
    with pytest.raises(UserError, match="another process"):
        program.train([small()])
