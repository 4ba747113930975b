"""Intervals and ratios on curves whose answer is known."""

import numpy as np
import pytest

from compare.stats import T_8, loss_gap, mean_interval, paired_ratios, step_time_ratio


def ar1(rng: np.random.Generator, n: int, rho: float) -> np.ndarray:
    """A stationary AR(1) series of mean 0 and variance 1."""
    x = rng.standard_normal(n + 200)
    for t in range(1, len(x)):
        x[t] = rho * x[t - 1] + np.sqrt(1 - rho**2) * x[t]
    return x[200:]


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_interval_covers_the_mean_of_autocorrelated_noise(rho):
    rng = np.random.default_rng(0)
    covered = [low <= 3 <= high for low, high in (mean_interval(3 + ar1(rng, 1000, rho)) for _ in range(400))]
    assert 0.92 <= np.mean(covered) <= 0.98


def test_quantile():
    rng = np.random.default_rng(0)
    t = rng.standard_normal(400_000) / np.sqrt(rng.chisquare(8, 400_000) / 8)
    assert np.mean(np.abs(t) <= T_8) == pytest.approx(0.95, abs=0.002)


def test_no_interval_for_short_curves():
    assert mean_interval(np.zeros(249)) is None
    assert mean_interval(np.zeros(250)) == (0.0, 0.0)


def test_gap_follows_its_definition():
    a = np.full(100, 2.0)
    b = a.copy()
    b[:10] += 100  # the warm-up does not count
    b[10:55] -= 0.05
    b[55:] += 0.01
    gap = loss_gap(a, b, warmup=10, tolerance=0.02)
    assert gap.gap == pytest.approx(0.01)
    assert gap.gap_abs == pytest.approx(0.03)
    assert gap.overlap == pytest.approx(0.5)
    assert gap.interval is None
    assert gap.n_steps == 90


def test_gap_needs_a_step_after_warmup():
    assert loss_gap(np.ones(5), np.ones(5), warmup=5, tolerance=0.02) is None
    assert loss_gap(np.full(9, np.nan), np.ones(9), warmup=5, tolerance=0.02) is None


def test_order_cancels_in_paired_ratios():
    base = np.full(40, 10.0)
    first = np.where(np.arange(40) % 2 == 0, 1.2, 1.0)  # whoever goes first pays 20 %
    ratios = paired_ratios(base * first, 1.05 * base * first[::-1])
    assert ratios == pytest.approx(np.full(20, 1.05))


def test_ratio_interval_covers_under_noise_that_both_share():
    rng = np.random.default_rng(1)
    hits = []
    for _ in range(100):
        load = np.exp(0.5 * ar1(rng, 300, 0.95))  # another process comes and goes
        a, b = (10 * load * np.exp(0.02 * rng.standard_normal(300)) for _ in range(2))
        ratio = step_time_ratio(a, 1.07 * b, resamples=400)
        hits.append(ratio.interval[0] <= 1.07 <= ratio.interval[1])
    assert np.mean(hits) >= 0.88


def test_ratio_ignores_warmup_and_needs_eight_pairs():
    ms = np.r_[np.full(10, np.nan), np.full(15, 5.0)]
    assert step_time_ratio(ms, ms) is None
    ms = np.r_[np.full(10, np.nan), np.full(16, 5.0)]
    assert step_time_ratio(ms, 2 * ms).median == 2.0
