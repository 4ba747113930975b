"""Ending a run between two steps, so that it can be saved: on Ctrl-C, SIGTERM, or Slurm's SIGUSR1."""

import os
import signal
import time

REQUEUE = 75
"""Exit status after all but Ctrl-C: sysexits.h's "try again", for Slurm's RequeueExit or a loop in a script."""
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]
ONE_REQUEST = 2  # seconds in which further signals are the same request: torchrun passes on what a terminal sent to all


def exit_status(number: int) -> int:
    """What a process that saved ends with, after signal `number`."""
    return 128 + number if number == signal.SIGINT else REQUEUE


class StopSignal:
    """While entered, the first signal sets `number` instead of ending the process; a later one ends it."""

    def __init__(self):
        self.number: int | None = None
        self.came = 0.0

    def __enter__(self) -> "StopSignal":
        self.before = {n: signal.signal(n, self._catch) for n in SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self.number is not None

    def _catch(self, number: int, frame) -> None:
        if not self:
            self.number, self.came = number, time.monotonic()
            if os.environ.get("RANK", "0") == "0":
                os.write(2, b"\nstopping after this step, to save; once more quits without saving\n")
        elif time.monotonic() - self.came > ONE_REQUEST:
            raise KeyboardInterrupt
