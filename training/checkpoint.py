"""Checkpoints: safetensors and JSON, written aside and renamed, held against their checksums when read.

    checkpoints/step_00000500/   model.safetensors  optim.safetensors  state.json  manifest.json
    checkpoints/best/            model.safetensors                     state.json  manifest.json
    checkpoints/latest           a link to the newest step

Where weights are split over processes, each writes its part, model-00001-of-00008.safetensors and so on, with its place
in the whole as torch.distributed.checkpoint notes it, whose reader hands any number of processes their parts. Nothing
is ever unpickled.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import xxhash
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch import Tensor, nn

from errors import UserError
from training.distributed import ALONE, World
from training.optim import AdamW, own_part

Tensors = dict[str, Tensor]
DIGESTS = {32: xxhash.xxh3_128, 64: hashlib.sha256}  # by their hexadecimal digits: SHA-256 is of earlier versions
OPTIONAL = "spikes."  # names that a checkpoint may lack, or hold in vain: train.on_spike was off, or is


class CorruptCheckpoint(Exception):
    """A checkpoint that is not what was written."""


def model_tensors(model: nn.Module) -> Tensors:
    """Weights by the plain module's names; tied ones appear once."""
    return {name: p.detach() for name, p in model.named_parameters()}


def optim_tensors(model: nn.Module, optimizer: AdamW) -> Tensors:
    """Moments and step counts, as PARAMETER.exp_avg and so on."""
    return {f"{name}.{k}": v for name, p in model.named_parameters() for k, v in optimizer.state[p].items()}


def restore(folder: Path, into: dict[str, Tensors]) -> None:
    """Reads tensors (file stem -> names -> values), or a process's parts of them, from a checkpoint found whole.

    UserError where any is missing, extra or misshapen.
    """
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, load

    saved = HuggingFaceStorageReader(str(folder)).read_metadata()
    shapes = {stem: {} for stem in into}
    for index, place in saved.storage_data.items():
        stem = re.match(r"\w+", Path(place.relative_path).name)[0]
        if stem in shapes:
            shapes[stem][index.fqn] = tuple(saved.state_dict_metadata[index.fqn].size)
    for stem, theirs in shapes.items():
        ours = {name: tuple(t.shape) for name, t in into[stem].items()}
        for name in {n for n in ours.keys() ^ theirs.keys() if n.startswith(OPTIONAL)}:
            (ours if name in ours else theirs).pop(name)
            into[stem].pop(name, None)
        if differing := sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n)):
            raise UserError(f"{folder} holds another model; {len(differing)} tensors differ, first {differing[0]}")
    whole = {name: t for named in into.values() for name, t in named.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # no_dist=True: each reads by itself
        try:
            load(whole, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
        except CheckpointException as e:  # no Exception, but a BaseException
            raise UserError(f"{folder} cannot be read: {next(iter(e.failures.values()))[0]}") from e


def _digest(path: Path, kind: Callable = xxhash.xxh3_128) -> str:
    """Hexadecimal; XXH3 takes a sixth of the time of SHA-256, and damage is what it is to find."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, kind).hexdigest()


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
    if folder.exists():  # else an old one may be all there is
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    by.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


class Writer:
    """Does jobs in a thread of its own, one after another, and none after one that failed."""

    def __init__(self):
        self.thread, self.last = ThreadPoolExecutor(1), None
        self.error, self.told = None, False

    def add(self, job: Callable[[], object]) -> Future:
        self.last = self.thread.submit(self._do, job)
        return self.last

    def _do(self, job: Callable[[], object]) -> None:
        try:
            if self.error is None:
                job()
        except Exception as error:
            self.error = error

    @property
    def failed(self) -> bool:
        return self.error is not None

    def wait(self) -> None:
        if self.last:
            self.last.result()

    def close(self) -> None:
        """Ends the thread, once all is done; says the error that `finish` did not raise, since another came first."""
        self.thread.shutdown()
        if self.error and not self.told:
            print(f"a checkpoint was not written: {self.error}", file=sys.stderr)

    def finish(self) -> None:
        """Waits for all jobs, and raises the error of the one that failed."""
        self.wait()
        if self.error:
            self.told = True
            raise self.error


class Staged:
    """A copy, in this process's memory, of what it is to write of some tensors, so that training may go on.

    `writing` is the job that reads the copy.
    """

    def __init__(self, world: World):
        self.world, self.held, self.writing = world, {}, None

    def copy(self, tensors: dict[str, Tensors]) -> dict[str, dict[str, tuple[Tensor, list[int]]]]:
        """File stem -> names -> (values, offset in the whole); memory is reused, once the copy before is written."""
        if self.writing:
            self.writing.result()
        parts = {}
        for stem, named in tensors.items():
            parts[stem] = {}
            for name, t in named.items():
                if (offset := offset_of(t, self.world)) is not None:
                    own = own_part(t)
                    held = self.held.setdefault((stem, name), own.new_empty(own.shape, device="cpu"))
                    parts[stem][name] = held.copy_(own), offset
        return parts


def offset_of(t: Tensor, world: World) -> list[int] | None:
    """Where this process's part of `t` begins; None where it has none to write, or another process writes the same."""
    if not hasattr(t, "device_mesh"):
        return [0] * t.ndim if world.first else None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    *replica, _ = t.device_mesh.get_coordinate()
    shape, offset = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
    return None if any(replica) or 0 in shape else list(offset)


def save(
    folder: Path, parts: dict, state: dict, world: World = ALONE, before: Callable[[], object] = lambda: None
) -> None:
    """Writes what `Staged.copy` gave and `state` to a new folder, whole or not at all; of every process, together.

    The first process calls `before` at its beginning.
    """
    aside = folder.with_name(f".new-{folder.name}")
    try:
        world.together(lambda: (before(), _fresh(aside)))
        digests = world.gathered(lambda: _write_parts(aside, parts, world))
        world.together(lambda: _finish(folder, aside, state, digests))
    except OSError:
        if world.first:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def _fresh(aside: Path) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)


def _write_parts(aside: Path, parts: dict, world: World) -> dict[str, str]:
    """Writes this process's files; returns their checksums by name."""
    digests = {}
    for stem, named in parts.items():
        if not named:
            continue
        offsets = {name: {"saved_offsets": offset} for name, (_, offset) in named.items()}
        place, notes = "", {"format": "pt"}
        if world.shards is not None:
            place = f"-{world.rank + 1:05d}-of-{world.n_shards:05d}"
            notes["DCP_SHARDING_INFO"] = json.dumps(offsets)
        path = aside / f"{stem}{place}.safetensors"
        try:
            serialize_file({name: _spec(values) for name, (values, _) in named.items()}, path, notes)
        except SafetensorError as e:
            if "No space left" in str(e):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from e
            raise
        path.chmod(aside.stat().st_mode & 0o666)  # as the umask makes files; the library's are the owner's alone
        _sync(path)
        digests[path.name] = _digest(path)
    return digests


def _spec(t: Tensor) -> TensorSpec:
    """Where a tensor lies, as save_file of safetensors.torch finds out with more Python, which training waits for."""
    dtype = str(t.dtype).removeprefix("torch.")
    return TensorSpec(dtype=dtype, shape=t.shape, data_ptr=t.data_ptr(), data_len=t.nbytes)


def _finish(folder: Path, aside: Path, state: dict, digests: list[dict[str, str]]) -> None:
    (aside / "state.json").write_text(json.dumps(state, indent=1))
    manifest = {name: digest for own in digests for name, digest in own.items()}
    if missing := [name for name in manifest if not (aside / name).exists()]:
        raise OSError(errno.ENOENT, f"{missing[0]} of another process is not here: runs_dir must be shared", str(aside))
    manifest["state.json"] = _digest(aside / "state.json")
    (aside / "manifest.json").write_text(json.dumps(manifest, indent=1))
    for name in ("state.json", "manifest.json"):
        _sync(aside / name)
    _sync(aside)
    _replace(folder, aside)
    if folder.name.startswith("step_"):
        _link(folder.with_name("latest"), folder.name)


def _link(link: Path, target: str) -> None:
    """Points `link` to `target` beside it; on Windows links are for administrators, and there is none."""
    aside = link.with_name(f".new-{link.name}")
    with contextlib.suppress(OSError if os.name == "nt" else ()):
        aside.unlink(missing_ok=True)
        aside.symlink_to(target, target_is_directory=True)
        aside.replace(link)


def check(folder: Path, world: World = ALONE) -> tuple[Path, dict]:
    """Where the checkpoint `folder` lies, and its state; CorruptCheckpoint where a file is not what its checksum says.

    Each process reads some of the files; all get the same answer.
    """
    if not folder.exists() and _old(folder).exists():
        folder = _old(folder)  # a kill came between the two renames of _replace
    for damage in filter(None, world.gathered(lambda: _damage(folder, world))):
        raise CorruptCheckpoint(damage)
    return folder, json.loads((folder / "state.json").read_text())


def _damage(folder: Path, world: World) -> str | None:
    """What is wrong with this process's share of the files, in words."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        for name, digest in sorted(manifest.items())[world.rank :: world.size]:
            if _digest(folder / name, DIGESTS[len(digest)]) != digest:
                return f"{folder / name} does not match its checksum"
            if name.endswith(".safetensors"):
                with safe_open(folder / name, "pt"):
                    pass
        json.loads((folder / "state.json").read_text())
        found = {f.name for f in folder.glob("*.safetensors")}
        return f"{folder} holds files that are not its own" if found - manifest.keys() else None
    except (OSError, ValueError, AttributeError, TypeError, KeyError, SafetensorError) as e:
        return f"{folder} is damaged ({type(e).__name__}: {e})"


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


def steps_saved(folder: Path) -> list[int]:
    """Steps of the checkpoints in `folder`, oldest first, whole or not."""
    return sorted(int(f.name[5:]) for f in folder.glob("step_*") if f.name[5:].isdigit())


def find(path: Path, world: World = ALONE) -> tuple[Path, dict]:
    """The whole checkpoint at `path`, or the newest one of the run there, and its state; UserError where there is none.

    Of a run without a whole step, its best weights.
    """

    def candidates() -> list[Path]:
        if not (path.is_dir() or _old(path).is_dir()):
            raise UserError(f"there is no folder {path}; give a run, runs/NAME, or runs/NAME/checkpoints/best")
        inside = path / "checkpoints"
        steps = [step_folder(inside, step) for step in reversed(steps_saved(inside))]
        return [*steps, inside / "best"] if inside.is_dir() else [path]

    damage = None
    for folder in world.together(candidates):
        try:
            return check(folder, world)
        except CorruptCheckpoint as e:
            damage = damage or e
    raise UserError(
        f"{path} holds no whole checkpoint ({damage}); give a run, runs/NAME, or one of its checkpoints, "
        "runs/NAME/checkpoints/best"
    )


def go_back(folder: Path, step: int) -> None:
    """Makes `step` the latest: later ones are renamed, so that they count no more, and what a kill left is removed."""
    for later in steps_saved(folder):
        if later > step:
            _replace(folder / f"unused_{step_folder(folder, later).name}", step_folder(folder, later))
    for half in folder.glob(".new-*"):
        remove = shutil.rmtree if half.is_dir() and not half.is_symlink() else os.unlink
        remove(half)
    _link(folder / "latest", step_folder(folder, step).name)


def prune(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep`."""
    for step in steps_saved(folder)[:-keep]:
        shutil.rmtree(step_folder(folder, step), ignore_errors=True)  # no reason to end a run
