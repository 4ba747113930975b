"""A run's folder: what it is called, when it may be touched, and what of its configuration may change on resume."""

import json
from dataclasses import asdict
from pathlib import Path

import yaml

from errors import UserError
from training.device import CHOICES

# keys that may differ between a run and its resumption
FREE_KEYS = {
    "checkpoint",
    "compare",
    "train.log_every",
    "train.sample_chars",
    "resume",
    "overwrite",
    "force",
    "runs_dir",
    "name",
    "wandb",
    "train.stop_at",
    "data.path",
    "data.cache_dir",
}


def plain(cfg) -> dict:
    """A Config as nested plain values: enums become their names."""
    return json.loads(json.dumps(asdict(cfg)))


def flat(config: dict, prefix: str = "") -> dict:
    """Nested values by dotted key."""
    items = {}
    for key, value in config.items():
        items |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return items


def folder_of(cfg) -> Path:
    if Path(cfg.name).name != cfg.name or cfg.name.startswith("."):
        raise UserError(f"name={cfg.name} must be one folder name; runs_dir says where it goes")
    return Path(cfg.runs_dir) / cfg.name


def check_folder(cfg) -> None:
    """Refuses to touch an existing run unless told how; on resume, takes over what its `auto` choices were."""
    folder = folder_of(cfg)
    if not folder.exists() or cfg.overwrite:
        return
    if not cfg.resume:
        raise UserError(
            f"{folder} exists; choose resume=true to go on, overwrite=true to start again, or another name=NAME"
        )
    try:
        saved = yaml.safe_load((folder / "config.yaml").read_text())
    except (OSError, yaml.YAMLError) as e:
        raise UserError(f"{folder} cannot be resumed: its config.yaml is missing or unreadable; overwrite=true") from e
    for key in CHOICES:
        if getattr(cfg, key) == "auto":
            setattr(cfg, key, type(getattr(cfg, key))(saved[key]))
    ours, theirs = flat(plain(cfg)), flat(saved)
    differing = [
        f"{key}: {theirs.get(key)} -> {ours.get(key)}"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key) and not {key, key.split(".")[0]} & FREE_KEYS
    ]
    if differing and not cfg.force:
        raise UserError(
            f"{folder} was made with another configuration ({'; '.join(differing)}); force=true resumes anyway"
        )


def check_data(cfg, record: dict) -> None:
    """Refuses to resume a run on another text or tokenizer; `record` is the tokens.json of the data now opened."""
    path = folder_of(cfg) / "environment.json"
    if not cfg.resume or cfg.overwrite or cfg.force or not path.exists():
        return
    saved = json.loads(path.read_text())["data"]
    for what in ("corpus_sha256", "split_rule", "tokenizer"):
        if saved[what] != record[what]:
            raise UserError(
                f"{path.parent} was trained on {saved['source']}, and {record['source']} is another text ({what}); "
                "give the same data, or force=true"
            )


def finished_summary(cfg) -> dict | None:
    """summary.json of a run that is to be resumed and has nothing left to do."""
    path = folder_of(cfg) / "summary.json"
    if not cfg.resume or cfg.overwrite or not path.exists():
        return None
    summary = json.loads(path.read_text())
    return summary if summary["status"] == "finished" and summary["step"] >= cfg.train.last_step else None
