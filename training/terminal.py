"""What a run shows while it trains: a progress bar on a terminal, plain lines in a pipe."""

import math
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class Screen:
    """Shows the newest loss, step time and tokens/s of every run; `labels` name them in the order of `show`.

    Nothing is shown unless `shown`.
    """

    def __init__(self, labels: list[str], *, start: int, last: int, shown: bool = True):
        self.labels, self.last, self.shown, self.started = labels, last, shown, None
        console = Console(stderr=True)
        self.bar = None
        if console.is_terminal and shown:
            # a narrow terminal cuts the last column, the losses and times
            columns = [TextColumn("{task.completed}/{task.total}"), BarColumn(bar_width=20), TimeRemainingColumn()]
            self.bar = Progress(*columns, TextColumn("{task.description}"), console=console)
            self.task = self.bar.add_task("starting", total=last, completed=start)

    def __enter__(self) -> "Screen":
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self.bar:
            self.bar.stop()

    def say(self, line: str) -> None:
        """A line that stays."""
        if self.bar:
            self.bar.console.print(line, highlight=False, soft_wrap=True)
        elif self.shown:
            print(line, file=sys.stderr, flush=True)

    def show(self, step: int, records: list[list[dict]]) -> None:
        """`records` holds, for each run, those since the last call."""
        if not all(records):
            return
        parts = [f"{label} {_loss(rs):.4f}" for label, rs in zip(self.labels, records, strict=True)]
        if len(records) == 2:
            parts.append(f"gap {_loss(records[0]) - _loss(records[1]):+.4f}")
        parts.append(" and ".join(f"{_step_ms(rs):.1f}" for rs in records) + " ms/step")
        if len(records) == 2:
            parts.append(f"ratio {_step_ms(records[0]) / _step_ms(records[1]):.3f}")
        tokens_per_step = records[0][-1]["tokens"] / step
        parts.append(f"{tokens_per_step / _step_ms(records[0]) * 1e3:,.0f} tokens/s")
        if self.bar:
            self.bar.update(self.task, completed=step, description="  ".join(parts))
        else:
            self.say("  ".join([f"step {step}/{self.last}", *parts, *self._left(step)]))

    def _left(self, step: int) -> list[str]:
        """The time left, as far as the steps since the first call tell."""
        if self.started is None:
            self.started = step, time.monotonic()
            return []
        first, began = self.started
        return [f"left {(time.monotonic() - began) / max(step - first, 1) * (self.last - step):.0f} s"]

    def evaluated(self, step: int, records: list[dict]) -> None:
        """One line of validation losses, one record a run."""
        parts = [
            f"{label} {r['val/loss']:.4f} ({r['val/bpb']:.4f} bits/byte)"
            for label, r in zip(self.labels, records, strict=True)
        ]
        self.say("  ".join([f"step {step}/{self.last}  validation", *parts]))


def _loss(records: list[dict]) -> float:
    return math.fsum(r["train/loss"] for r in records) / len(records)


def _step_ms(records: list[dict]) -> float:
    times = sorted(r.get("time/step_ms", r.get("time/warmup_ms")) for r in records)
    return times[len(times) // 2]
