"""Where metrics go: metrics.jsonl always, and W&B when it is on. The loop knows neither."""

import json
import netrc
import os
import sys
import uuid
from pathlib import Path

from files import finite
from training.config import WandbMode

INIT_TIMEOUT_S = 5


class Tracker:
    """Appends records to FOLDER/metrics.jsonl and passes them on to a W&B run, or to none."""

    def __init__(self, folder: Path, wandb_run=None):
        self.path, self.wandb_run = folder / "metrics.jsonl", wandb_run
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (lives as long as the run)

    def log(self, records: list[dict]) -> None:
        """Writes records whole; a number that is not finite becomes null, since JSON has no NaN."""
        for record in records:
            self.file.write(json.dumps(finite(record)) + "\n")
        self.file.flush()
        if self.wandb_run is not None:
            for record in records:
                self.wandb_run.log(record, step=record["step"])

    def sync(self) -> None:
        """Has all that was logged reach the disk."""
        os.fsync(self.file.fileno())

    def close(self, summary: dict, exit_code: int = 0) -> None:
        self.file.close()
        if self.wandb_run is not None:
            self.wandb_run.log({}, commit=True)  # else the last row, written at the end, would replace the summary
            self.wandb_run.summary.update(summary)
            self.wandb_run.finish(exit_code=exit_code)
            self.wandb_run = None


def cut_metrics(path: Path, step: int) -> None:
    """Drops what a run resumed at `step` will write again: training steps after it, evaluations from it on."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break  # a killed writer's last line
        if record["step"] < step or (record["step"] == step and "train/loss" in record):
            kept.append(line + "\n")
    aside = path.with_suffix(".new")
    aside.write_text("".join(kept), encoding="utf-8")
    aside.replace(path)


def new_run_id() -> str:
    return uuid.uuid4().hex[:8]


def has_wandb_key() -> bool:
    """Whether `wandb login` was done, or an environment variable names a key."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def wandb_mode(configured: WandbMode) -> WandbMode:
    """WANDB_MODE, else the configuration; online needs a key, since W&B would stop and ask for one."""
    mode = WandbMode(os.environ["WANDB_MODE"]) if os.environ.get("WANDB_MODE") in set(WandbMode) else configured
    if mode in (WandbMode.auto, WandbMode.online):
        if mode == WandbMode.online and not has_wandb_key():
            print(
                "wandb.mode=online finds no key, so this run is logged offline; `wandb login` sets one up",
                file=sys.stderr,
            )
        return WandbMode.online if has_wandb_key() else WandbMode.offline
    return mode


def start_wandb(
    folder: Path, *, config: dict, name: str, group: str | None, tags: list[str], mode: WandbMode, run_id: str
):
    """A W&B run in FOLDER/wandb, or None when disabled. Never prompts; online falls back to offline in seconds."""
    if mode == WandbMode.disabled:
        return None
    import wandb

    settings = wandb.Settings(init_timeout=INIT_TIMEOUT_S, console="off", silent=True)
    common = {
        "project": os.environ.get("WANDB_PROJECT") or config["wandb"]["project"],
        "dir": str(folder),
        "config": config,
        "name": name,
        "group": group,
        "tags": tags + [t for t in os.environ.get("WANDB_TAGS", "").split(",") if t],
        "id": run_id,
        "resume": "allow",
        "reinit": "create_new",
        "settings": settings,
    }
    try:
        return wandb.init(mode=mode.value, **common)
    except wandb.Error as e:
        if mode == WandbMode.offline:
            raise
        reason = str(e).splitlines()[0]
        print(
            f"W&B is out of reach, so this run is logged offline; `wandb sync` sends it later ({reason})",
            file=sys.stderr,
        )
        return wandb.init(mode="offline", **common | {"id": new_run_id()})  # the first id counts as in use
