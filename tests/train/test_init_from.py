"""init_from=PATH takes weights and nothing else; resume=true goes on from a run's own checkpoint."""

import json
from pathlib import Path

import pytest
import torch

import train as program
from errors import UserError
from tests.train.runs import metrics, run, weights
from training import checkpoint


@pytest.fixture
def pretrained(small) -> Path:
    return run(small("name=pretrained", "train.steps=10", "checkpoint.every=5"))


def first_loss(folder: Path) -> float:
    return next(r["val/loss"] for r in metrics(folder) if "val/loss" in r)


@pytest.mark.parametrize("inside", ["", "checkpoints/step_00000010", "checkpoints/latest", "checkpoints/best"])
def test_weights_come_from_a_run_or_a_checkpoint(small, pretrained, inside, capsys):
    folder = run(small(f"init_from={pretrained / inside}"))
    last = [r["val/loss"] for r in metrics(pretrained) if "val/loss" in r][-1]
    assert first_loss(folder) == last
    assert "begins with the weights of" in capsys.readouterr().err
    assert weights(folder, 20)["embedding.weight.step"] == 20  # the optimiser starts anew


def test_best_weights_that_a_kill_left_half_replaced_are_found(small, pretrained):
    best = pretrained / "checkpoints" / "best"
    best.rename(best.with_name(".old-best"))
    run(small(f"init_from={best}", "train.steps=1"))


def test_resume_goes_on_from_the_run_s_own_checkpoint(small, pretrained):
    straight = run(small(f"init_from={pretrained}", "name=straight"))
    run(small(f"init_from={pretrained}", "train.stop_at=10"))
    resumed = run(small(f"init_from={pretrained}", "resume=true"))
    assert metrics(straight) == metrics(resumed)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(small, pretrained):
    newest = checkpoint.step_folder(pretrained / "checkpoints", 10) / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    expected = weights(pretrained, 5)
    cfg = small(f"init_from={pretrained}", "optim.lr=0", "optim.min_lr=0", "train.steps=1")
    assert torch.equal(weights(run(cfg), 1)["blocks.0.mlp.down.weight"], expected["blocks.0.mlp.down.weight"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["init_from=/nowhere"], "there is no folder /nowhere"),
        (["init_from={}/checkpoints"], "no whole checkpoint"),
        (["init_from={}", "model.n_embd=64"], "holds another model"),
        (["init_from={}", "data.tokenizer=char"], "other tokens"),
    ],
)
def test_what_does_not_fit_is_refused(small, pretrained, overrides, message):
    with pytest.raises(UserError, match=message):
        program.train([small(*(o.format(pretrained) for o in overrides))])


def test_twins_of_other_initial_weights_cannot_begin_with_the_same(train_py, pretrained):
    done = train_py("norm=rmsnorm", "against=seed", f"init_from={pretrained}")
    assert done.returncode == 2
    assert "init_from gives both the same" in done.stderr


def test_a_checkpoint_from_before_tokenizers_were_noted_is_taken(small, pretrained):
    folder = checkpoint.step_folder(pretrained / "checkpoints", 10)
    state = json.loads((folder / "state.json").read_text())
    del state["tokenizer"]
    (folder / "state.json").write_text(json.dumps(state))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["state.json"] = checkpoint._digest(folder / "state.json")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    run(small(f"init_from={pretrained}", "train.steps=1"))
