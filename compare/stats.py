"""How far two loss curves lie apart, and how their step times compare, each with the interval that its noise allows."""

from dataclasses import dataclass

import numpy as np

MIN_POINTS = 250  # below this the interval for the gap does not cover what it says
COSINE_TERMS = 8
T_8 = 2.306004  # 97.5 % quantile of Student's t with 8 degrees of freedom


@dataclass
class Gap:
    """Differences d_t = loss_B(t) - loss_A(t) after the learning rate's warm-up, nats per token."""

    gap: float
    """Mean of d_t over the last half."""
    interval: tuple[float, float] | None
    """95 %, for this pair of runs alone; None under 250 points."""
    gap_abs: float
    """Mean of |d_t|."""
    overlap: float
    """Share of steps with |d_t| within the tolerance; it knows of no seed noise."""
    n_steps: int
    """How many d_t there are."""


@dataclass
class Ratio:
    """Step time of B over step time of A."""

    median: float
    interval: tuple[float, float]
    """95 %, block bootstrap."""


def mean_interval(d: np.ndarray) -> tuple[float, float] | None:
    """95 % interval for the mean of an autocorrelated series, or None where it is too short.

    Equal-weighted cosine estimate of the long-run variance with 8 terms, and t with 8 degrees of freedom
    (Lazarus, Lewis, Stock & Watson 2018, eq. 10): it holds its coverage for AR(1) noise up to about 0.95 at n = 1000.
    """
    n = len(d)
    if n < MIN_POINTS:
        return None
    j, t = np.arange(1, COSINE_TERMS + 1)[:, None], np.arange(n)[None, :] + 0.5
    weights = np.sqrt(2 / n) * np.cos(np.pi * j * t / n)  # (terms, n)
    half = T_8 * np.sqrt(np.mean((weights @ d) ** 2) / n)
    return float(d.mean() - half), float(d.mean() + half)


def loss_gap(loss_a: np.ndarray, loss_b: np.ndarray, *, warmup: int, tolerance: float) -> Gap | None:
    """Compares the curves (n,) of A and B, step by step on the same batches; None where no step lies after warm-up."""
    d = (loss_b - loss_a)[warmup:]
    d = d[np.isfinite(d)]
    if not len(d):
        return None
    last_half = d[len(d) // 2 :]
    return Gap(
        gap=float(last_half.mean()),
        interval=mean_interval(last_half),
        gap_abs=float(np.abs(d).mean()),
        overlap=float((np.abs(d) <= tolerance).mean()),
        n_steps=len(d),
    )


def paired_ratios(ms_a: np.ndarray, ms_b: np.ndarray) -> np.ndarray:
    """B/A of each two consecutive steps, (n,) -> (n // 2,): either went first in one of them, so order cancels."""
    both = np.isfinite(ms_a) & np.isfinite(ms_b)
    log_ratio = np.log(ms_b[both] / ms_a[both])
    return np.exp(log_ratio[: len(log_ratio) // 2 * 2].reshape(-1, 2).mean(axis=1))


def step_time_ratio(ms_a: np.ndarray, ms_b: np.ndarray, *, resamples: int = 2000, seed: int = 0) -> Ratio | None:
    """Median of the paired ratios with its interval, or None under 8 pairs.

    Percentiles of a circular block bootstrap (Politis & Romano 1992): blocks of n^(1/3) pairs keep together what a
    busy machine does to neighbouring steps.
    """
    ratios = paired_ratios(ms_a, ms_b)
    n = len(ratios)
    if n < 8:
        return None
    length = round(n ** (1 / 3))
    rng = np.random.default_rng(seed)
    starts = rng.integers(n, size=(resamples, -(-n // length)))
    picked = (starts[:, :, None] + np.arange(length)).reshape(resamples, -1)[:, :n] % n
    low, high = np.percentile(np.median(ratios[picked], axis=1), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), (float(low), float(high)))
