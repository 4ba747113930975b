"""Where metrics go: metrics.jsonl always, and W&B when it is on. The loop knows neither."""

import json
import os
from pathlib import Path

from files import finite, write_text
from records import read_records
from training.wandb_page import LOWEST, WandbPage


class Tracker:
    """Appends records to FOLDER/metrics.jsonl and passes them on to a W&B run, or to none."""

    def __init__(self, folder: Path, wandb_run=None):
        self.path, self.page = folder / "metrics.jsonl", WandbPage(wandb_run)
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (lives as long as the run)

    def log(self, records: list[dict]) -> None:
        """Writes records whole; a number that is not finite becomes null, since JSON has no NaN."""
        for record in records:
            self.file.write(json.dumps(finite(record)) + "\n")
        self.file.flush()
        for record in records:
            self.page.log(record, step=record["step"])

    def attach(self, table: tuple[list[str], list[list]], png: Path, html: Path) -> None:
        """Puts a comparison on the run's page on W&B: a table (columns, rows), a picture, a page; before `close`."""
        self.page.attach(table, png, html)

    def sync(self) -> None:
        """Has all that was logged reach the disk."""
        os.fsync(self.file.fileno())

    def close(self, summary: dict, exit_code: int = 0) -> None:
        """Ends the records, and W&B's run with `summary` and the lowest losses; never waits long for W&B."""
        self.file.close()
        self.page.close(summary | lowest(self.path), exit_code)


class Silent:
    """The tracker of a process that is not the first: it writes nothing."""

    def log(self, records: list[dict]) -> None: ...

    def attach(self, table: tuple[list[str], list[list]], png: Path, html: Path) -> None: ...

    def sync(self) -> None: ...

    def close(self, summary: dict, exit_code: int = 0) -> None: ...


def lowest(path: Path) -> dict[str, float]:
    """NAME_min for each of LOWEST that metrics.jsonl holds: the whole run's, resumed or not."""
    records, _ = read_records(path)
    found = {name: [r[name] for r in records if r.get(name) is not None] for name in LOWEST}
    return {f"{name}_min": min(values) for name, values in found.items() if values}


def cut_metrics(path: Path, step: int) -> None:
    """Drops what a run resumed at `step` will write again: training steps after it, evaluations from it on."""
    records, _ = read_records(path)
    kept = [r for r in records if r["step"] < step or (r["step"] == step and "train/loss" in r)]
    if path.exists():
        write_text(path, "".join(json.dumps(record) + "\n" for record in kept))
