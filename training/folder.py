"""A run's folder: what it is called, when it may be touched, and what of its configuration may change on resume."""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import yaml

from errors import UserError
from records import FREE_KEYS, flat, is_run
from training.device import CHOICES
from training.distributed import launch

try:
    import fcntl
except ImportError:  # Windows has no such lock
    fcntl = None


DATA_KEYS = ("corpus_sha256", "split_rule", "tokenizer")  # of tokens.json: what makes the batches
LASTING = ("git_commit", "versions", "device", "threads", "processes")  # of environment.json: what shapes the last bits


def plain(cfg) -> dict:
    """A Config as nested plain values: enums become their names."""
    return json.loads(json.dumps(asdict(cfg)))


def folder_of(cfg) -> Path:
    if Path(cfg.name).name != cfg.name or cfg.name.startswith("."):
        raise UserError(f"name={cfg.name} must be one folder name; runs_dir says where it goes")
    return Path(cfg.runs_dir) / cfg.name


def check_folder(cfg) -> None:
    """Refuses to touch an existing folder unless told how; on resume, takes over what its `auto` choices were.

    A run that torchrun restarts is resumed, whatever was typed.
    """
    folder = folder_of(cfg)
    if restarted(cfg):
        cfg.resume, cfg.overwrite = True, False
    if cfg.resume and cfg.overwrite:
        raise UserError("resume=true goes on and overwrite=true starts again: choose one")
    if not folder.exists():
        return
    if not is_run(folder) and any(folder.iterdir()):
        raise UserError(f"{folder} holds something else than a run, and is not touched; choose another name=NAME")
    if not (cfg.resume or cfg.overwrite):
        raise UserError(
            f"{folder} exists; choose resume=true to go on, overwrite=true to start again, or another name=NAME"
        )
    if cfg.resume and is_run(folder):
        check_config(cfg, folder)


def restarted(cfg) -> bool:
    """Whether torchrun started this process anew, and the run is one that those before it had begun."""
    if launch() is None:
        return False
    try:
        began = json.loads((folder_of(cfg) / "environment.json").read_text())
        return began["launch"] == launch()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def check_config(cfg, folder: Path) -> None:
    """Takes over the `auto` choices of the run in `folder`, and refuses any other change of what shapes its numbers."""
    try:
        saved = yaml.safe_load((folder / "config.yaml").read_text())
        for key in CHOICES:
            if getattr(cfg, key) == "auto":
                setattr(cfg, key, type(getattr(cfg, key))(saved[key]))
        cfg.data.parts = cfg.data.parts or saved["data"].get("parts")
        theirs = flat(plain(type(cfg)())) | flat(saved)  # a run from before a key was there has what it stands for
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as e:
        raise UserError(
            f"{folder}/config.yaml is damaged, so the run cannot be resumed; choose another name=NAME"
        ) from e
    ours = flat(plain(cfg))
    differing = [
        f"{key}: {theirs.get(key)} -> {ours.get(key)}"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key) and not {key, key.split(".")[0]} & FREE_KEYS
    ]
    if differing and not cfg.force:
        raise UserError(
            f"{folder} was made with another configuration ({'; '.join(differing)}); force=true resumes anyway"
        )


def check_data(cfg, records: list[dict]) -> None:
    """Refuses processes with different data, and to resume a run on another text or tokenizer.

    `records` are the tokens.json of what each process opened.
    """
    record = records[0]
    if what := next((w for w in DATA_KEYS if any(r[w] != record[w] for r in records)), None):
        raise UserError(f"the machines have different data ({what} differs); give all the same text and Python")
    folder = folder_of(cfg)
    if not cfg.resume or cfg.force or not is_run(folder):
        return
    try:
        saved = json.loads((folder / "environment.json").read_text())["data"]
        what = next((w for w in DATA_KEYS if saved[w] != record[w]), None)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{folder}/environment.json is damaged: what data it had is unknown; force=true resumes") from e
    if what is not None:
        raise UserError(
            f"{folder} was trained on {saved['source']}, and {record['source']} now is another text ({what} differs); "
            "give the same data, or force=true"
        )


def finished_summary(cfg, records: list[dict]) -> dict | None:
    """summary.json of a run that is to be resumed, on the data of `records`, and has nothing left to do."""
    check_data(cfg, records)
    path = folder_of(cfg) / "summary.json"
    if not cfg.resume or cfg.force or not path.exists():
        return None
    try:
        summary = json.loads(path.read_text())
        return summary if summary["status"] == "finished" and summary["step"] >= cfg.train.last_step else None
    except (ValueError, KeyError, TypeError):
        return None  # it is written anew


def with_history(folder: Path, environment: dict) -> dict:
    """`environment` with those of the processes that worked on the run before, oldest first, under "before"."""
    path = folder / "environment.json"
    if not path.exists():
        return environment | {"before": []}
    try:
        last = json.loads(path.read_text())
        before = [*last.pop("before"), {k: v for k, v in last.items() if k not in ("data", "batch_hashes")}]
        changed = [key for key in LASTING if last.get(key) != environment[key]]
        if changed:
            what = ", ".join(changed)
            print(
                f"{folder} goes on with another {what}; its numbers may differ from an undisturbed run's",
                file=sys.stderr,
            )
    except (ValueError, KeyError, TypeError, AttributeError):
        before = ["damaged"]
    return environment | {"before": before}


@contextmanager
def claimed(folders: list[Path]) -> Iterator[None]:
    """Keeps other processes of this machine out of `folders`; the system lifts the lock when the process ends."""
    with ExitStack() as stack:
        for folder in folders if fcntl else []:
            locks = folder.parent / ".locks"
            try:
                locks.mkdir(parents=True, exist_ok=True)
            except FileNotFoundError as e:  # in a folder of the system's own, such as /proc
                raise UserError(f"{locks} cannot be made; choose another place with runs_dir=") from e
            lock = stack.enter_context(open(locks / folder.name, "w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as e:
                raise UserError(
                    f"{folder} is in use by another process; wait for it, or choose another name=NAME"
                ) from e
        yield
