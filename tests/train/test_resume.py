"""A run that was stopped goes on as if it had not been, from the newest whole checkpoint, and only on the same data."""

import json
import random

import pytest
import torch
import yaml

import train as program
from errors import UserError
from tests.train.runs import COMPILED, MODES, metrics, run, same, weights
from training import checkpoint
from training.run import Run, resume


@pytest.mark.parametrize("mode", MODES)
def test_20_steps_equal_10_and_10_resumed(small, mode):
    torch.set_num_threads(2)
    overrides = [f"compile={mode}", "model.dropout=0.1", "train.accumulate=2"]
    straight = run(small(*overrides, "name=straight"))
    run(small(*overrides, "name=resumed", "train.stop_at=10"))
    resumed = run(small(*overrides, "name=resumed", "resume=true"))
    assert metrics(straight) == metrics(resumed)
    assert same(weights(straight, 20), weights(resumed, 20))
    assert (json.loads((resumed / "summary.json").read_text()))["status"] == "finished"


def test_a_stop_between_evaluations_leaves_no_trace(small):
    straight = run(small("name=straight"))
    run(small("name=resumed", "train.stop_at=7"))
    resumed = run(small("name=resumed", "resume=true"))
    assert metrics(straight) == metrics(resumed)


@COMPILED
def test_auto_choices_are_taken_from_the_run_that_is_resumed(small):
    run(small("train.stop_at=10", "compile=full"))
    folder = run(small("compile=auto", "resume=true"))
    assert yaml.safe_load((folder / "config.yaml").read_text())["compile"] == "full"


def test_a_checkpoint_ahead_of_its_metrics_is_passed_over(small, capsys):
    straight = run(small("name=straight", "checkpoint.every=5"))
    folder = run(small("checkpoint.every=5", "train.stop_at=15"))
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-4]))  # never reached the disk
    run(small("checkpoint.every=5", "resume=true"))
    assert "lacks steps" in capsys.readouterr().err
    assert metrics(folder) == metrics(straight)


def test_a_corrupt_checkpoint_is_passed_over(small, capsys):
    straight = run(small("name=straight"))
    folder = run(small("train.stop_at=15", "checkpoint.every=5"))
    newest = checkpoint.step_folder(folder / "checkpoints", 15) / "optim.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    run(small("resume=true", "checkpoint.every=0"))
    assert "step 15 cannot be resumed from" in capsys.readouterr().err
    assert (folder / "checkpoints" / "unused_step_00000015").exists()
    assert metrics(folder) == metrics(straight)
    assert same(weights(folder, 20), weights(straight, 20))
    for f in folder.glob("checkpoints/step_*/state.json"):
        f.write_text("{")
    (folder / "summary.json").unlink()
    with pytest.raises(UserError, match="no whole checkpoint"):
        program.train([small("resume=true")])


def test_a_checkpoint_damaged_anywhere_is_never_loaded(small):
    folder = run(small("checkpoint.every=5", "train.stop_at=10"))
    newest, rng = checkpoint.step_folder(folder / "checkpoints", 10), random.Random(0)
    files = sorted(newest.iterdir())
    for n in range(400):
        path = rng.choice(files)
        whole = path.read_bytes()
        at = rng.randrange(len(whole))
        changed = whole[:at] if n < 200 else whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :]
        path.write_bytes(changed)
        with pytest.raises(checkpoint.CorruptCheckpoint):
            checkpoint.check(newest)
        if n % 40 == 0:  # the whole way
            cfg = small("resume=true", "kernels=torch")
            resumed = Run(cfg, program.open_tokens(cfg.data))
            assert resume([resumed]) == 5
            assert same(resumed.tensors()["model"] | resumed.tensors()["optim"], weights(folder, 5))
            (folder / "checkpoints" / "unused_step_00000010").rename(newest)
        path.write_bytes(whole)
    checkpoint.check(newest)


def test_each_process_that_worked_on_a_run_is_on_record(small, capsys):
    folder = run(small("train.stop_at=10"))
    environment = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps(environment | {"threads": 99}))
    run(small("resume=true"))
    assert "goes on with another threads" in capsys.readouterr().err
    assert [b["threads"] for b in json.loads((folder / "environment.json").read_text())["before"]] == [99]


def test_resuming_a_finished_run_does_nothing(small, capsys):
    folder = run(small("train.steps=2"))
    before = (folder / "metrics.jsonl").read_bytes()
    run(small("train.steps=2", "resume=true"))
    assert "finished before" in capsys.readouterr().err
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_step_behind_the_run_is_refused(small):
    run(small("train.stop_at=10"))
    with pytest.raises(UserError, match="at step 10 already"):
        program.train([small("train.stop_at=5", "resume=true", "force=true")])


@pytest.mark.parametrize("stop", [10, 20])
def test_another_text_is_not_resumed_on(small, text_file, stop):
    folder = run(small(f"train.stop_at={stop}"))
    text_file.write_text(text_file.read_text().replace("argument", "ARGUMENT"))
    with pytest.raises(UserError, match="another text"):
        program.train([small("resume=true")])
    assert metrics(folder)[-1]["step"] == stop
