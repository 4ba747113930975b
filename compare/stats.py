"""How far loss curves lie apart, over steps and over seeds, and how step times compare, each with its interval.

Within one pair of runs the noise is that of the steps, autocorrelated; it describes that pair. What describes two norms
is the spread over seeds: bands and verdicts come from there alone. scipy is imported where a quantile is needed.
"""

from dataclasses import dataclass

import numpy as np

MIN_POINTS = 250  # below this the interval for the gap does not cover what it says
MIN_PAIRS = 50  # of steps; the same for the ratio of step times
COSINE_TERMS = 8
T_8 = 2.306004  # 97.5 % quantile of Student's t with 8 degrees of freedom
POWER = 0.8
MOST_SEEDS = 1000  # a verdict that needs more is not in reach

EQUIVALENT, DIFFERENT, UNDECIDED = "equivalent", "different", "not enough seeds"


# one pair of runs, over its steps


@dataclass
class Gap:
    """Differences d_t = loss_B(t) - loss_A(t) after the learning rate's warm-up, in the unit of the losses."""

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
    """95 %."""


def mean_error(d: np.ndarray) -> float:
    """Standard error, with 8 degrees of freedom, of the mean of an autocorrelated series (n,).

    Square root of the long-run variance over n, the variance estimated by the equal-weighted average of the squares of
    8 cosine transforms (Lazarus, Lewis, Stock & Watson 2018, eq. 10).
    """
    n = len(d)
    j, t = np.arange(1, COSINE_TERMS + 1)[:, None], np.arange(n)[None, :] + 0.5
    weights = np.sqrt(2 / n) * np.cos(np.pi * j * t / n)  # (terms, n)
    return float(np.sqrt(np.mean((weights @ d) ** 2) / n))


def mean_interval(d: np.ndarray) -> tuple[float, float] | None:
    """95 % interval for the mean of an autocorrelated series (n,), or None under 250 points.

    Student's t with 8 degrees of freedom times `mean_error`: it covers what it says for AR(1) noise up to about 0.95 at
    n = 1000, and up to 0.9 at n = 350.
    """
    if len(d) < MIN_POINTS:
        return None
    half = T_8 * mean_error(d)
    return float(d.mean() - half), float(d.mean() + half)


def median_interval(x: np.ndarray) -> tuple[float, float] | None:
    """95 % interval for the median of an autocorrelated series (n,), or None under 50 points.

    The quantiles at 1/2 plus and minus the error of the share below the median (Woodruff 1952), that error being the
    `mean_error` of the indicator series: outliers count for no more than their side, and slow swings widen it.
    """
    if len(x) < MIN_PAIRS:
        return None
    half = T_8 * mean_error((x <= np.median(x)).astype(float) - 0.5)
    low, high = np.quantile(x, [max(0.5 - half, 0), min(0.5 + half, 1)])
    return float(low), float(high)


def gap(d: np.ndarray, *, tolerance: float) -> Gap | None:
    """Sums up the differences d_t (n,) after warm-up; None where none is finite."""
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


def step_time_ratio(ms_a: np.ndarray, ms_b: np.ndarray) -> Ratio | None:
    """Median of the paired ratios with its interval, or None under 50 pairs."""
    ratios = paired_ratios(ms_a, ms_b)
    interval = median_interval(ratios)
    return interval and Ratio(float(np.median(ratios)), interval)


def first_reached(x: np.ndarray, loss: np.ndarray, target: float) -> float | None:
    """Where a curve, `loss` over `x`, both (n,), first comes down to `target`, on straight lines; None where never."""
    below = np.flatnonzero(loss <= target)
    if not len(below):
        return None
    i = below[0]
    if i == 0:
        return float(x[0])
    share = (loss[i - 1] - target) / (loss[i - 1] - loss[i])
    return float(x[i - 1] + share * (x[i] - x[i - 1]))


# many runs, over their seeds


@dataclass
class Difference:
    """Mean over seeds of B minus mean of A, and what its error is; arrays where the values were curves."""

    mean: np.ndarray
    error: np.ndarray
    """Standard error of `mean`."""
    df: np.ndarray
    """Degrees of freedom of `error`."""
    spread: np.ndarray
    """Standard deviation of the difference of one pair or, unpaired, of one run of each."""

    def half_width(self, level: float) -> np.ndarray:
        """Half of the central interval that holds the true difference with probability `level`, for normal noise."""
        from scipy.stats import t

        return t.ppf(0.5 + level / 2, self.df) * self.error

    def interval(self, level: float) -> tuple[float, float]:
        half = self.half_width(level)
        return float(self.mean - half), float(self.mean + half)


def difference(a: np.ndarray, b: np.ndarray, *, paired: bool) -> Difference | None:
    """B minus A over seeds, the first axis: (n_a, ...) and (n_b, ...); None where a spread cannot be had.

    Paired, row i of both is one seed: Student's error of the mean of the differences, n - 1 degrees of freedom (Student
    1908). Else the two variances add (Welch 1947), with the smaller of the two n - 1: Welch's own degrees of freedom
    make up to one false verdict in ten where few seeds meet many, or the spreads differ.
    """
    if min(len(a), len(b)) < 2:
        return None
    n_a, n_b = len(a), len(b)
    if paired:
        error = (b - a).std(axis=0, ddof=1) / np.sqrt(n_b)
        spread = error * np.sqrt(n_b)
    else:
        error = np.sqrt(a.var(axis=0, ddof=1) / n_a + b.var(axis=0, ddof=1) / n_b)
        spread = np.sqrt(a.var(axis=0, ddof=1) + b.var(axis=0, ddof=1))
    df = np.full(np.shape(error), min(n_a, n_b) - 1.0)
    return Difference(b.mean(axis=0) - a.mean(axis=0), error, df, spread)


def overlap(curves: Difference) -> float:
    """Share of points where the seeds' noise alone could have made the difference: |mean| <= t_95% x error."""
    return float(np.mean(np.abs(curves.mean) <= curves.half_width(0.95)))


def verdict(final: Difference, margin: float) -> np.ndarray:
    """What the 90 % interval says: inside +-margin "equivalent", outside "different", else "not enough seeds"; (...).

    Two one-sided tests at 5 % (Schuirmann 1987); "different" is the same with the hypotheses exchanged, so that either
    word is wrong at most one time in twenty.
    """
    low, high = final.mean - final.half_width(0.90), final.mean + final.half_width(0.90)
    inside, outside = (-margin < low) & (high < margin), (low > margin) | (high < -margin)
    return np.select([inside, outside], [EQUIVALENT, DIFFERENT], UNDECIDED)


def verdict_power(n: int, *, mean: float, sd: float, margin: float) -> tuple[float, float]:
    """Probabilities of "equivalent" and of "different" with n seeds, were the true difference `mean`.

    `sd` is that of the paired differences, or of the difference of two single runs where unpaired. Exact for normal,
    paired noise: the normal probability given the estimated spread, averaged over that spread's chi distribution (Owen
    1965; Phillips 1990 for the two one-sided tests). Unpaired it holds where it is high, as for `seeds_needed`.
    """
    from scipy.stats import chi2, norm, t

    df = n - 1
    shares = (np.arange(2000) + 0.5) / 2000
    spread = np.sqrt(chi2.ppf(shares, df) / df)  # estimated over true sd
    reach = t.ppf(0.95, df) * spread
    scale = np.sqrt(n) / sd
    below, above = (margin - mean) * scale - reach, (-margin - mean) * scale + reach
    equivalent = np.clip(norm.cdf(below) - norm.cdf(above), 0, None).mean()
    outside = norm.sf((margin - mean) * scale + reach) + norm.cdf((-margin - mean) * scale - reach)
    return float(equivalent), float(outside.mean())


def seeds_needed(mean: float, sd: float, margin: float) -> int | None:
    """Fewest seeds that give the verdict with power 0.8, were `mean` and `sd` the truth; None beyond 1000."""
    if sd == 0:
        return 2 if abs(mean) != margin else None

    def power(n: int) -> float:
        return max(verdict_power(n, mean=mean, sd=sd, margin=margin))

    if power(MOST_SEEDS) < POWER:
        return None
    enough = 2
    while power(enough) < POWER:
        enough *= 2
    low = enough // 2
    while enough - low > 1:  # power(low) < POWER <= power(enough)
        middle = (low + enough) // 2
        low, enough = (low, middle) if power(middle) >= POWER else (middle, enough)
    return max(enough, 2)
