"""Step times beside a process that never rests: more steps of both twins by one thread, in its own CPU time.

CPU time holds no waiting for a core. With several threads it does not help: they wait for each other, and spin.
"""

import time

import numpy as np
import torch

from compare.stats import MIN_PAIRS, step_time_ratio
from data.loader import TrainBatches
from files import write_json
from records import ONE_THREAD
from training.run import Run
from training.stop import StopSignal
from training.timing import WARMUP_STEPS

STEPS = 200
WARMUP = 5
MOST_SECONDS = 180


def needed(runs: list[Run]) -> bool:
    """Whether the steps of two twins on a CPU were enough for a ratio of their times, had no other process had it."""
    enough = len(runs) == 2 and runs[0].world.size == 1 and len(runs[0].step_ms) >= WARMUP_STEPS + 2 * MIN_PAIRS
    return enough and runs[0].device.type == "cpu" and not step_time_ratio(*(np.array(run.step_ms) for run in runs))


def time_by_one_thread(runs: list[Run], batches: TrainBatches, *, step: int, stop: StopSignal) -> None:
    """Writes each run's `one_thread.json`, {"step_ms": CPU milliseconds of more steps}, after `step` trained ones.

    Their learning rate is 0, so weights stay as they are; call it once all is saved. A signal, or too much time, ends
    it sooner.
    """
    threads, began = torch.get_num_threads(), time.monotonic()
    step_ms = {run: [] for run in runs}
    torch.set_num_threads(1)
    try:
        for extra in range(WARMUP + STEPS):
            if stop or time.monotonic() - began > MOST_SECONDS:
                break
            x, y = (torch.from_numpy(tokens) for tokens in batches(step + extra))
            for run in runs if extra % 2 == 0 else reversed(runs):
                step_ms[run].append(run.ms_by(time.thread_time, step, x, y))
    finally:
        torch.set_num_threads(threads)
    for run, ms in step_ms.items():
        write_json(run.folder / ONE_THREAD, {"step_ms": ms[WARMUP:]})
