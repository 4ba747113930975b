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
    assert median_interval(np.zeros(49)) is None
    assert median_interval(np.full(50, 3.0)) == (3.0, 3.0)


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


def test_ratio_ignores_warmup_and_needs_fifty_pairs():
    ms = np.r_[np.full(10, np.nan), np.full(99, 5.0)]
    assert stats.step_time_ratio(ms, ms) is None
    ms = np.r_[np.full(10, np.nan), np.full(100, 5.0)]
    assert stats.step_time_ratio(ms, 2 * ms).median == 2.0


def test_paired_differences_are_those_of_students_test():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((5, 3)), rng.standard_normal((5, 3)) * 2 + 1
    ours, theirs = difference(a, b, paired=True), scipy_stats.ttest_rel(b, a).confidence_interval(0.9)
    assert ours.mean - ours.half_width(0.9) == pytest.approx(theirs.low)
    assert ours.mean + ours.half_width(0.9) == pytest.approx(theirs.high)
    assert ours.spread == pytest.approx((b - a).std(axis=0, ddof=1))


def test_unpaired_differences_have_welchs_error_and_the_smaller_degrees_of_freedom():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((7, 3)), rng.standard_normal((4, 3)) * 2 + 1
    ours, theirs = difference(a, b, paired=False), scipy_stats.ttest_ind(b, a, equal_var=False)
    assert ours.mean / ours.error == pytest.approx(theirs.statistic)
    assert (ours.df == 3).all()
    assert (ours.df < theirs.df).all()
    assert ours.spread == pytest.approx(np.sqrt(a.var(axis=0, ddof=1) + b.var(axis=0, ddof=1)))


@pytest.mark.parametrize(("n_a", "n_b", "ratio"), [(2, 10, 4), (2, 10, 1), (10, 2, 4), (3, 3, 4), (2, 3, 0.25)])
def test_unpaired_verdicts_of_unequal_groups_are_not_wrong_more_often(n_a, n_b, ratio):
    rng = np.random.default_rng(0)
    a, b = ratio * rng.standard_normal((n_a, 4000)) * 0.2, 1 + rng.standard_normal((n_b, 4000)) * 0.2
    d = difference(a, b, paired=False)
    wrong = (d.mean - d.half_width(0.9) > 1).mean(), (np.abs(d.mean) + d.half_width(0.9) < 1).mean()
    assert max(wrong) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 4000)


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
        return stats.verdict(Difference(*map(np.float64, (mean, error, df, error))), margin=1.0)

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
