"""Ending a run on Ctrl-C or SIGTERM between two steps, so that it can be saved."""

import os
import signal


class StopSignal:
    """While entered, the first SIGINT or SIGTERM sets `number` instead of ending the process; a second one ends it."""

    def __init__(self):
        self.number: int | None = None

    def __enter__(self) -> "StopSignal":
        self.before = {n: signal.signal(n, self._catch) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self.number is not None

    def _catch(self, number: int, frame) -> None:
        if self:
            raise KeyboardInterrupt
        self.number = number
        os.write(2, b"\nstopping after this step, to save; once more quits without saving\n")
