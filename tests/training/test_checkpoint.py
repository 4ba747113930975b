"""Whole or not at all; refused where a single byte differs; nothing unpickled."""

import hashlib
import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from errors import UserError
from training import checkpoint
from training.checkpoint import (
    CorruptCheckpoint,
    Staged,
    Writer,
    check,
    go_back,
    prune,
    restore,
    step_folder,
    steps_saved,
)
from training.distributed import ALONE


def tensors() -> dict:
    return {
        "model": {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.ones(())},
        "optim": {"a.weight.step": torch.ones(())},
    }


def save(folder, named: dict, state: dict) -> None:
    checkpoint.save(folder, Staged(ALONE).copy(named), state)


def load(folder) -> tuple[dict, dict]:
    """Checks and reads a checkpoint of `tensors()`."""
    found, state = check(folder)
    into = {
        stem: {name: torch.full_like(t, torch.nan) for name, t in named.items()} for stem, named in tensors().items()
    }
    restore(found, into)
    return into, state


def test_round_trip(tmp_path):
    save(tmp_path / "step_00000003", tensors(), {"step": 3})
    loaded, state = load(tmp_path / "step_00000003")
    assert state == {"step": 3}
    for stem, named in tensors().items():
        assert all(torch.equal(loaded[stem][name], t) for name, t in named.items())


def test_a_checkpoint_with_the_checksums_of_before_is_read(tmp_path):
    save(tmp_path / "it", tensors(), {"step": 3})
    manifest = json.loads((tmp_path / "it/manifest.json").read_text())
    older = {name: hashlib.sha256((tmp_path / "it" / name).read_bytes()).hexdigest() for name in manifest}
    (tmp_path / "it/manifest.json").write_text(json.dumps(older))
    assert load(tmp_path / "it")[1] == {"step": 3}
    (tmp_path / "it/state.json").write_text("{}")
    with pytest.raises(CorruptCheckpoint, match="does not match its checksum"):
        check(tmp_path / "it")


def test_files_are_as_open_as_the_umask_lets_them(tmp_path):
    before = os.umask(0o027)
    try:
        save(tmp_path / "it", tensors(), {})
    finally:
        os.umask(before)
    assert {f.name: f.stat().st_mode & 0o777 for f in (tmp_path / "it").iterdir()} == dict.fromkeys(
        ["model.safetensors", "optim.safetensors", "state.json", "manifest.json"], 0o640
    )


def test_latest_is_the_newest_step(tmp_path):
    for step in (3, 6):
        save(step_folder(tmp_path, step), tensors(), {"step": step})
        assert load(tmp_path / "latest")[1] == {"step": step}
    assert os.readlink(tmp_path / "latest") == "step_00000006"


def test_a_copy_is_not_changed_by_what_comes_after_it(tmp_path):
    staged, ours = Staged(ALONE), tensors()
    parts = staged.copy(ours)
    ours["model"]["a.weight"].zero_()
    assert parts["model"]["a.weight"][0].sum() == 15
    again = staged.copy(ours)
    assert again["model"]["a.weight"][0] is parts["model"]["a.weight"][0]  # memory is taken once


def test_a_writer_stops_at_an_error_and_tells_of_it(capsys):
    writer, done = Writer(), []
    writer.add(lambda: done.append(1))
    writer.add(lambda: 1 / 0)
    writer.add(lambda: done.append(2))
    with pytest.raises(ZeroDivisionError):
        writer.finish()
    assert writer.failed
    assert done == [1]
    writer.close()
    assert capsys.readouterr().err == ""


def test_an_error_that_nobody_was_told_of_is_said(capsys):
    writer = Writer()
    writer.add(lambda: 1 / 0)
    writer.close()
    assert "a checkpoint was not written: division by zero" in capsys.readouterr().err


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

    monkeypatch.setattr(checkpoint, "serialize_file", full)
    with pytest.raises(OSError, match="No space"):
        save(folder, tensors(), {"step": 4})
    assert load(folder)[1] == {"step": 3}
    assert sorted(f.name for f in tmp_path.iterdir()) == ["latest", folder.name]


def test_saving_over_an_old_one_replaces_it(tmp_path):
    for step in (3, 4):
        save(tmp_path / "best", tensors(), {"step": step})
    assert load(tmp_path / "best")[1] == {"step": 4}
    assert [f.name for f in tmp_path.iterdir()] == ["best"]


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", ".metadata", "model.pt"])
def test_a_pickle_is_not_loaded(tmp_path, name):
    """.metadata is what torch.distributed.checkpoint's own reader unpickles."""

    class Hostile:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    folder = tmp_path / "step_00000003"
    save(folder, tensors(), {"step": 3})
    (folder / name).write_bytes(pickle.dumps(Hostile()))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest[name] = checkpoint._digest(folder / name)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    if name in ("model.safetensors", "state.json"):
        with pytest.raises(CorruptCheckpoint):
            load(folder)
    else:
        load(folder)  # it is not looked at
    assert not (tmp_path / "ran").exists()


def test_restore_is_strict(tmp_path):
    save(tmp_path / "it", tensors(), {})
    whole = tensors()["model"]
    for into in ({"b": torch.ones(())}, whole | {"c": torch.ones(1)}, whole | {"a.weight": torch.ones(3, 2)}):
        with pytest.raises(UserError, match="another model"):
            restore(tmp_path / "it", {"model": into})
    restore(tmp_path / "it", {"model": whole})  # the optimiser's are not asked for


def test_a_file_that_is_not_its_own_is_refused(tmp_path):
    save(tmp_path / "it", tensors(), {})
    (tmp_path / "it" / "model-00002-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(CorruptCheckpoint, match="not its own"):
        check(tmp_path / "it")


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    save(tmp_path / "best", tensors(), {"step": 3})
    (tmp_path / "best").rename(tmp_path / ".old-best")
    assert load(tmp_path / "best")[1] == {"step": 3}
    whole = Path.rename
    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):  # and another kill, before the next one stands
        save(tmp_path / "best", tensors(), {"step": 4})
    assert load(tmp_path / "best")[1] == {"step": 3}
    monkeypatch.setattr(Path, "rename", whole)
    save(tmp_path / "best", tensors(), {"step": 4})
    assert load(tmp_path / "best")[1] == {"step": 4}


def test_going_back_deletes_nothing_but_what_is_half_written(tmp_path):
    for step in (1, 2):
        save(step_folder(tmp_path, step), tensors(), {"step": step})
    (tmp_path / ".new-step_00000003").mkdir()
    (tmp_path / ".new-step_00000003" / "model.safetensors").write_bytes(b"half")
    go_back(tmp_path, 1)
    assert steps_saved(tmp_path) == [1]
    assert os.readlink(tmp_path / "latest") == "step_00000001"
    assert not list(tmp_path.glob(".new-*"))
    assert load(tmp_path / "unused_step_00000002")[1] == {"step": 2}


def test_prune_keeps_the_newest(tmp_path):
    for step in (1, 20, 3):
        step_folder(tmp_path, step).mkdir()
    (tmp_path / "best").mkdir()
    prune(tmp_path, keep=2)
    assert steps_saved(tmp_path) == [3, 20]
    assert (tmp_path / "best").exists()
