"""Ends processes of which one holds up the others, and says which, and where in the code it is."""

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path

import torch.distributed as dist

ROOT = str(Path(__file__).resolve().parent.parent)
# where the main thread of a process stands that waits for others, for its GPU, which does, or for a disk
WAITING = ("torch/distributed", "torch/autograd", "training/distributed", "training/timing", "training/checkpoint")
ANSWER_S = 3
EXIT = 70
"""Exit status: sysexits.h's "software error"."""


class Watchdog:
    """While entered, each of `size` processes must `beat` every `timeout_s` seconds; where one does not, all end.

    The first whose time is up asks all where they are, by `store`, and a thread of each answers. A store behind a cut
    network does not answer at all, so no thread that must end waits for it.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float):
        self.store, self.rank, self.size, self.timeout_s = store, rank, size, timeout_s
        self.tick_s = min(1.0, timeout_s / 10)
        self.main = threading.main_thread().ident
        self.done = threading.Event()
        self.beat()

    def beat(self) -> None:
        self.last = time.monotonic()

    def __enter__(self) -> "Watchdog":
        self.beat()
        for work in (self._answer, self._watch):
            threading.Thread(target=work, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.done.set()

    def _answer(self) -> None:
        with contextlib.suppress(RuntimeError):  # the others have ended
            while not self.done.wait(self.tick_s):
                if self.store.check(["asked"]):
                    self.store.set(f"answer {self.rank}", json.dumps(self._where()))
                    return

    def _watch(self) -> None:
        while not self.done.wait(self.tick_s):
            if time.monotonic() - self.last > self.timeout_s:
                answers: dict[int, tuple[bool, str]] = {}
                asking = threading.Thread(target=self._ask, args=(answers,), daemon=True)
                asking.start()
                asking.join(self.tick_s + 2 * ANSWER_S)
                if self.rank == min(answers, default=self.rank):
                    what = verdict(answers, self.size) if answers else f"rank {self.rank} cannot reach the others"
                    os.write(2, f"error: no step was finished in {self.timeout_s:.0f} s: {what}\n".encode())
                os._exit(EXIT)

    def _ask(self, answers: dict[int, tuple[bool, str]]) -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            self.store.set("asked", "")
            time.sleep(self.tick_s + ANSWER_S)
            for rank in range(self.size):
                if self.store.check([f"answer {rank}"]):
                    answers[rank] = json.loads(self.store.get(f"answer {rank}"))

    def _where(self) -> tuple[bool, str]:
        """Whether the main thread waits for other processes, and the line of ours it is at."""
        stack = traceback.extract_stack(sys._current_frames()[self.main])
        ours = [f for f in stack if f.filename.startswith(ROOT) and "site-packages" not in f.filename]
        last = (ours or stack)[-1]
        waits = any(place in Path(frame.filename).as_posix() for frame in stack for place in WAITING)
        return waits, f"{os.path.relpath(last.filename, ROOT)}:{last.lineno} ({last.name})"


def verdict(answers: dict[int, tuple[bool, str]], size: int) -> str:
    """Which rank holds up the others, by who answered, whether it waits, and where it is."""
    held = [rank for rank in range(size) if rank not in answers]
    held = held or [rank for rank, (waits, _) in answers.items() if not waits]
    if not held:
        return "all wait for each other, or for a disk; is the network between them cut?"
    what = [f"rank {r} " + (f"is at {answers[r][1]}" if r in answers else "does not answer") for r in held]
    return f"{', '.join(what)}; the others wait for it"
