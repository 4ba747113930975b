"""Ends processes of which one holds up the others, and says which, and where in the code it is."""

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

ROOT = str(Path(__file__).resolve().parent.parent)
# where the main thread of a process stands that waits for others, or for its GPU, which does
WAITING = ("torch/distributed", "torch/autograd", "training/distributed.py", "training/timing.py")
ANSWER_S = 3
EXIT = 70
"""Exit status: sysexits.h's "software error"."""


class Watchdog:
    """While entered, each of `size` processes must `beat` every `timeout_s` seconds; where none does, all end."""

    def __init__(self, rank: int, size: int, timeout_s: float):
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=ANSWER_S))
        self.key = f"watchdog/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        self.main = threading.main_thread().ident
        self.done = threading.Event()
        self.beat()

    def beat(self) -> None:
        self.last = time.monotonic()

    def __enter__(self) -> "Watchdog":
        self.beat()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.done.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.done.wait(min(1.0, self.timeout_s / 10)):
            if time.monotonic() - self.last > self.timeout_s:
                message, speaker = self._verdict()
                if self.rank == speaker:
                    os.write(2, f"error: no step was finished in {self.timeout_s:.0f} s: {message}\n".encode())
                os._exit(EXIT)

    def _ask(self, answers: dict[int, tuple[bool, str]]) -> None:
        """Tells the others where this process is, and collects their `answers`."""
        with contextlib.suppress(RuntimeError, ValueError):
            self.store.set(f"{self.key}/{self.rank}", json.dumps(self._where()))
            time.sleep(ANSWER_S)
            for rank in range(self.size):
                if self.store.check([name := f"{self.key}/{rank}"]):
                    answers[rank] = json.loads(self.store.get(name))

    def _verdict(self) -> tuple[str, int]:
        """What to say, and the rank that says it."""
        answers = {}
        asking = threading.Thread(target=self._ask, args=(answers,), daemon=True)
        asking.start()
        asking.join(2 * ANSWER_S)  # a store behind a cut network never answers
        if self.rank not in answers:
            return f"rank {self.rank} cannot reach the others", self.rank
        silent = [rank for rank in range(self.size) if rank not in answers]
        held = silent or [rank for rank, (waits, _) in answers.items() if not waits]
        if not held:
            return "all wait for each other; is the network between them cut?", min(answers)
        what = [f"rank {r} " + (f"is at {answers[r][1]}" if r in answers else "does not answer") for r in held]
        return f"{', '.join(what)}; the others wait for it", min(answers)

    def _where(self) -> tuple[bool, str]:
        """Whether the main thread waits for other processes, and the line of ours it is at."""
        stack = traceback.extract_stack(sys._current_frames()[self.main])
        ours = [f for f in stack if f.filename.startswith(ROOT) and "site-packages" not in f.filename]
        last = (ours or stack)[-1]
        waits = any(place in Path(frame.filename).as_posix() for frame in stack for place in WAITING)
        return waits, f"{os.path.relpath(last.filename, ROOT)}:{last.lineno} ({last.name})"
