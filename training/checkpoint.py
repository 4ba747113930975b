"""Checkpoints: safetensors and JSON, written aside and renamed, held against their checksums when read.

    checkpoints/step_00000500/   model.safetensors  optim.safetensors  state.json  manifest.json
    checkpoints/best/            model.safetensors                     state.json  manifest.json

Nothing is ever unpickled.
"""

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from errors import UserError
from training.optim import AdamW

Tensors = dict[str, Tensor]


class CorruptCheckpoint(Exception):
    """A checkpoint that is not what was written."""


def model_tensors(model: nn.Module) -> Tensors:
    """Weights by the plain module's names; tied ones appear once."""
    return {name: p.detach() for name, p in model.named_parameters()}


def optim_tensors(model: nn.Module, optimizer: AdamW) -> Tensors:
    """Moments and step counts, as PARAMETER.exp_avg and so on."""
    return {f"{name}.{k}": v for name, p in model.named_parameters() for k, v in optimizer.state[p].items()}


@torch.no_grad()
def restore(into: Tensors, saved: Tensors, what: str) -> None:
    """Copies `saved` into tensors of the same names and shapes; UserError where any is missing, extra or misshapen."""
    ours, theirs = ({name: tuple(t.shape) for name, t in tensors.items()} for tensors in (into, saved))
    if ours != theirs:
        differing = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
        raise UserError(f"{what} holds another model; {len(differing)} tensors differ, first {differing[0]}")
    for name, tensor in into.items():
        tensor.copy_(saved[name])


def _digest(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Has a file, or the names in a folder, reach the disk; Windows cannot sync a folder."""
    if path.is_dir() and os.name == "nt":
        return
    fd = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _old(folder: Path) -> Path:
    return folder.with_name(f".old-{folder.name}")


def _replace(folder: Path, by: Path) -> None:
    """Renames `by` to `folder`; an old folder of that name goes once the new one stands."""
    old = _old(folder)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    by.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def save(folder: Path, tensors: dict[str, Tensors], state: dict) -> None:
    """Writes `tensors` (file stem -> names -> values) and `state` to a new folder, whole or not at all."""
    aside = folder.with_name(f".new-{folder.name}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        for stem, named in tensors.items():
            save_file({name: t.cpu().contiguous() for name, t in named.items()}, aside / f"{stem}.safetensors")
        (aside / "state.json").write_text(json.dumps(state, indent=1))
        (aside / "manifest.json").write_text(
            json.dumps({f.name: _digest(f) for f in sorted(aside.iterdir())}, indent=1)
        )
        for f in aside.iterdir():
            _sync(f)
        _replace(folder, aside)
    except SafetensorError as e:
        shutil.rmtree(aside, ignore_errors=True)
        if "No space left" in str(e):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from e
        raise
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def load(folder: Path) -> tuple[dict[str, Tensors], dict]:
    """Tensors by file stem, and the state; raises CorruptCheckpoint where a file is not what its checksum says."""
    if not folder.exists() and _old(folder).exists():
        folder = _old(folder)  # a kill came between the two renames of _replace
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        for name, digest in manifest.items():
            if _digest(folder / name) != digest:
                raise CorruptCheckpoint(f"{folder / name} does not match its checksum")
        state = json.loads((folder / "state.json").read_text())
        return {f.stem: load_file(f) for f in sorted(folder.glob("*.safetensors"))}, state
    except (OSError, ValueError, AttributeError, TypeError, SafetensorError) as e:
        raise CorruptCheckpoint(f"{folder} is damaged ({type(e).__name__}: {e})") from e


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


def steps_saved(folder: Path) -> list[int]:
    """Steps of the checkpoints in `folder`, oldest first, whole or not."""
    return sorted(int(f.name[5:]) for f in folder.glob("step_*") if f.name[5:].isdigit())


def set_aside(folders: list[Path]) -> None:
    """Renames checkpoints so that they count no more; none is deleted."""
    for folder in folders:
        _replace(folder.with_name(f"unused_{folder.name}"), folder)


def prune(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep`."""
    for step in steps_saved(folder)[:-keep]:
        shutil.rmtree(step_folder(folder, step))
