"""Intervals, bands and verdicts on curves whose answer is known."""

import numpy as np
import pytest
from scipy import stats as scipy_stats

from compare import stats
from compare.stats import Difference, difference, first_reached, mean_interval, median_interval
from scripts.check_stats import INTERVALS, MARGIN, ar1, coverage, verdicts


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9, 0.95])
@pytest.mark.parametrize("name", INTERVALS)
def test_intervals_cover_what_they_say(name, rho):
    assert 0.92 <= coverage(INTERVALS[name], rho=rho, simulations=1000) <= 0.98


def test_the_median_interval_covers_under_outliers_of_one_side():
    rng = np.random.default_rng(0)
    held = []
    for x in ar1(rng, 500, 400, 0.5):
        x[rng.random(400) < 0.1] += 50
        low, high = median_interval(x)
        held.append(low <= scipy_stats.norm.ppf(0.5 / 0.9) <= high)
    assert 0.91 <= np.mean(held) <= 0.99


def test_quantile():
    assert pytest.approx(scipy_stats.t.ppf(0.975, 8), abs=1e-6) == stats.T_8


def test_no_interval_for_short_curves():
    assert mean_interval(np.zeros(249)) is None
    assert mean_interval(np.zeros(250)) == (0.0, 0.0)
    assert median_interval(np.zeros(19)) is None
    assert median_interval(np.full(20, 3.0)) == (3.0, 3.0)


def test_gap_follows_its_definition():
    d = np.r_[np.full(45, -0.05), np.full(45, 0.01), np.nan]
    gap = stats.gap(d, tolerance=0.02)
    assert gap.gap == pytest.approx(0.01)
    assert gap.gap_abs == pytest.approx(0.03)
    assert gap.overlap == pytest.approx(0.5)
    assert gap.interval is None
    assert gap.n_steps == 90
    assert stats.gap(np.full(9, np.nan), tolerance=0.02) is None


def test_order_cancels_in_paired_ratios():
    base = np.full(40, 10.0)
    first = np.where(np.arange(40) % 2 == 0, 1.2, 1.0)  # whoever goes first pays 20 %
    ratios = stats.paired_ratios(base * first, 1.05 * base * first[::-1])
    assert ratios == pytest.approx(np.full(20, 1.05))


def test_the_ratio_is_covered_under_load_that_both_share():
    rng = np.random.default_rng(1)
    hits = []
    for load in np.exp(0.5 * ar1(rng, 500, 300, 0.95)):  # another process comes and goes
        a, b = (10 * load * np.exp(0.02 * rng.standard_normal(300)) for _ in range(2))
        low, high = stats.step_time_ratio(a, 1.07 * b).interval
        hits.append(low <= 1.07 <= high)
    assert 0.92 <= np.mean(hits) <= 0.98


def test_ratio_ignores_warmup_and_needs_twenty_pairs():
    ms = np.r_[np.full(10, np.nan), np.full(39, 5.0)]
    assert stats.step_time_ratio(ms, ms) is None
    ms = np.r_[np.full(10, np.nan), np.full(40, 5.0)]
    assert stats.step_time_ratio(ms, 2 * ms).median == 2.0


@pytest.mark.parametrize("paired", [True, False])
def test_differences_are_those_of_scipys_tests(paired):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((5, 3)), rng.standard_normal((5 if paired else 4, 3)) * 2 + 1
    ours = difference(a, b, paired=paired)
    theirs = scipy_stats.ttest_rel(b, a) if paired else scipy_stats.ttest_ind(b, a, equal_var=False)
    low, high = theirs.confidence_interval(0.9)
    assert ours.mean - ours.half_width(0.9) == pytest.approx(low)
    assert ours.mean + ours.half_width(0.9) == pytest.approx(high)


def test_one_seed_has_no_spread_and_equal_seeds_none():
    assert difference(np.zeros(1), np.ones(1), paired=True) is None
    assert difference(np.zeros(3), np.ones(1), paired=False) is None
    for paired in (True, False):
        same = difference(np.zeros(3), np.ones(3), paired=paired)
        assert (same.mean, same.error) == (1, 0)
        assert np.isfinite(same.half_width(0.9))


def test_overlap_is_the_share_of_points_within_the_seeds_noise():
    rng = np.random.default_rng(0)
    shared = np.array([[-0.1], [0.0], [0.1]])  # of a seed, in both variants
    a = shared + 0.01 * rng.standard_normal((3, 400))
    b = shared + 0.01 * rng.standard_normal((3, 400)) + np.r_[np.zeros(200), np.full(200, 0.08)]
    assert stats.overlap(difference(a, b, paired=False)) == 1.0
    assert stats.overlap(difference(a, b, paired=True)) == pytest.approx(0.5, abs=0.06)


def test_verdicts_are_what_the_interval_says():
    def said(mean, error=0.1, df=9):
        return stats.verdict(Difference(np.float64(mean), np.float64(error), np.float64(df)), margin=1.0)

    half = scipy_stats.t.ppf(0.95, 9) * 0.1
    assert [said(m) for m in (0.0, 1 - half - 1e-6, -1 + half + 1e-6)] == [stats.EQUIVALENT] * 3
    assert [said(m) for m in (1 - half + 1e-6, 1.0, -1 - half + 1e-6)] == [stats.UNDECIDED] * 3
    assert [said(m) for m in (1 + half + 1e-6, -2.0)] == [stats.DIFFERENT] * 2


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_a_verdict_is_wrong_at_most_one_time_in_twenty(paired, n):
    for mean in (MARGIN, -MARGIN):
        shares = verdicts(n, mean=mean, sd=0.3 * MARGIN, paired=paired, simulations=3000)
        noise = 3 * np.sqrt(0.05 * 0.95 / 3000)
        assert max(shares.values()) <= 0.05 + noise
        if paired:
            assert max(shares.values()) >= 0.05 - noise  # no weaker than need be


@pytest.mark.parametrize(("n", "mean", "sd"), [(3, 0.0, 0.5), (5, 0.5, 0.5), (4, 2.0, 0.7), (6, -1.5, 0.5)])
def test_power_is_the_share_of_verdicts(n, mean, sd):
    shares = verdicts(n, mean=mean, sd=sd, paired=True, simulations=3000)
    predicted = stats.verdict_power(n, mean=mean, sd=sd, margin=MARGIN)
    assert predicted == pytest.approx(list(shares.values()), abs=0.03)


@pytest.mark.parametrize(("mean", "sd"), [(0.0, 1.0), (0.8, 0.5), (3.0, 2.0), (0.0, 1e-6)])
def test_the_advised_seeds_have_the_power_and_one_less_has_not(mean, sd):
    def power(n):
        return max(stats.verdict_power(n, mean=mean, sd=sd, margin=1.0))

    n = stats.seeds_needed(mean, sd, 1.0)
    assert power(n) >= 0.8
    assert n == 2 or power(n - 1) < 0.8


def test_no_number_of_seeds_settles_a_difference_on_the_margin():
    assert stats.seeds_needed(1.0, 0.5, 1.0) is None
    assert stats.seeds_needed(0.0, 0.0, 1.0) == 2


def test_first_reached_is_on_straight_lines():
    x, loss = np.array([0.0, 100, 200, 300]), np.array([5.0, 3, 2, 2.5])
    assert first_reached(x, loss, 2.5) == 150
    assert first_reached(x, loss, 5.0) == 0
    assert first_reached(x, loss, 1.0) is None
