"""Learning-rate schedules as pure functions of the step."""

import math

from training.config import Schedule

DECAY_SHARE = 0.2  # of the steps after warm-up, for warm-up-stable-decay (Hu et al. 2024, MiniCPM: 10 to 20 %)

# t in [0, 1]: the share of the steps after warm-up that have passed; value: the share of peak - floor that is left
SHAPES = {
    Schedule.cosine: lambda t: 0.5 * (1 + math.cos(math.pi * t)),
    Schedule.linear: lambda t: 1 - t,
    Schedule.wsd: lambda t: min(1.0, (1 - t) / DECAY_SHARE),
    Schedule.constant: lambda t: 1.0,
}


def lr_at(step: int, *, peak: float, floor: float, warmup: int, total: int, shape: Schedule = Schedule.cosine) -> float:
    """Learning rate of step 0, 1, ... total - 1.

    Linear warm-up starts above 0 and reaches `peak` in step `warmup - 1`; one longer than the run never gets there.
    The last step's rate is `floor` (`constant` stays at peak).
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    t = (step - warmup + 1) / max(total - warmup, 1)
    return floor + (peak - floor) * SHAPES[shape](min(t, 1.0))
