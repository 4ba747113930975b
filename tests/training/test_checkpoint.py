"""Whole or not at all; refused where a single byte differs; nothing unpickled."""

import json
import os
import pickle

import pytest
import torch

from errors import UserError
from training import checkpoint
from training.checkpoint import CorruptCheckpoint, load, prune, restore, save, set_aside, step_folder, steps_saved


def tensors() -> dict:
    return {
        "model": {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.ones(())},
        "optim": {"a.weight.step": torch.ones(())},
    }


def test_round_trip(tmp_path):
    save(tmp_path / "step_00000003", tensors(), {"step": 3})
    loaded, state = load(tmp_path / "step_00000003")
    assert state == {"step": 3}
    assert loaded.keys() == tensors().keys()
    for stem, named in tensors().items():
        assert all(torch.equal(loaded[stem][name], t) for name, t in named.items())


def test_every_flipped_byte_is_seen(tmp_path):
    folder = tmp_path / "step_00000003"
    save(folder, tensors(), {"step": 3})
    for f in sorted(folder.iterdir()):
        whole = f.read_bytes()
        for at in range(0, len(whole), 7):
            f.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(CorruptCheckpoint):
                load(folder)
        f.write_bytes(whole)
    load(folder)


def test_every_cut_is_seen(tmp_path):
    folder = tmp_path / "step_00000003"
    save(folder, tensors(), {"step": 3})
    for f in sorted(folder.iterdir()):
        whole = f.read_bytes()
        for length in range(0, len(whole), 11):
            f.write_bytes(whole[:length])
            with pytest.raises(CorruptCheckpoint):
                load(folder)
        f.unlink()
        with pytest.raises(CorruptCheckpoint):
            load(folder)
        f.write_bytes(whole)


def test_a_failed_save_leaves_the_old_one(tmp_path, monkeypatch):
    folder = tmp_path / "step_00000003"
    save(folder, tensors(), {"step": 3})

    def full(*_, **__):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        save(folder, tensors(), {"step": 4})
    assert load(folder)[1] == {"step": 3}
    assert [f.name for f in tmp_path.iterdir()] == [folder.name]


def test_saving_over_an_old_one_replaces_it(tmp_path):
    for step in (3, 4):
        save(tmp_path / "best", tensors(), {"step": step})
    assert load(tmp_path / "best")[1] == {"step": 4}
    assert [f.name for f in tmp_path.iterdir()] == ["best"]


def test_a_pickle_is_not_loaded(tmp_path):
    class Hostile:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    folder = tmp_path / "step_00000003"
    save(folder, tensors(), {"step": 3})
    (folder / "model.safetensors").write_bytes(pickle.dumps(Hostile()))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["model.safetensors"] = checkpoint._digest(folder / "model.safetensors")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CorruptCheckpoint):
        load(folder)
    assert not (tmp_path / "ran").exists()


def test_restore_is_strict():
    into = tensors()["model"]
    for saved in (
        {"b": torch.ones(())},
        into | {"c": torch.ones(1)},
        {"a.weight": torch.ones(3, 2), "b": torch.ones(())},
    ):
        with pytest.raises(UserError, match="another model"):
            restore(into, saved, "it")


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path):
    save(tmp_path / "best", tensors(), {"step": 3})
    (tmp_path / "best").rename(tmp_path / ".old-best")
    assert load(tmp_path / "best")[1] == {"step": 3}
    save(tmp_path / "best", tensors(), {"step": 4})
    assert load(tmp_path / "best")[1] == {"step": 4}


def test_set_aside_deletes_nothing(tmp_path):
    for step in (1, 2):
        save(step_folder(tmp_path, step), tensors(), {"step": step})
    set_aside([step_folder(tmp_path, 2)])
    assert steps_saved(tmp_path) == [1]
    assert load(tmp_path / "unused_step_00000002")[1] == {"step": 2}


def test_prune_keeps_the_newest(tmp_path):
    for step in (1, 20, 3):
        step_folder(tmp_path, step).mkdir()
    (tmp_path / "best").mkdir()
    prune(tmp_path, keep=2)
    assert steps_saved(tmp_path) == [3, 20]
    assert (tmp_path / "best").exists()
