"""Holds the comparison's intervals and verdicts against simulated runs whose answer is known.

python -m scripts.check_stats [to=results/compare/statistics.json] [simulations=10000]

Coverage of the 95 % intervals over 1000 differences with AR(1) noise; how often a verdict is wrong, where wrong is
likeliest (the true difference on the margin), and how often it is reached; what adding seeds one by one does to that.
"""

from dataclasses import dataclass

import numpy as np
from scipy.signal import lfilter

from compare import stats
from scripts.options import run_script
from scripts.results import table, write

MARGIN = 1.0  # the unit of what follows: spreads and differences are in margins
POINTS = 1000
MOST = 12  # seeds, where they are added until a verdict comes


@dataclass
class Options:
    to: str | None = None
    simulations: int = 10_000


def ar1(rng: np.random.Generator, rows: int, n: int, rho: float) -> np.ndarray:
    """Stationary AR(1) series of mean 0 and variance 1, (rows, n)."""
    noise = rng.standard_normal((rows, n + 200)) * np.sqrt(1 - rho**2)
    return lfilter([1], [1, -rho], noise, axis=1)[:, 200:]


def coverage(interval, *, rho: float, simulations: int, seed: int = 0) -> float:
    """Share of 95 % intervals that hold the true value, 0, of a series of 1000 points."""
    series = ar1(np.random.default_rng(seed), simulations, POINTS, rho)
    found = np.array([interval(x) for x in series])
    return float(np.mean((found[:, 0] <= 0) & (found[:, 1] >= 0)))


def verdicts(n: int, *, mean: float, sd: float, paired: bool, simulations: int, seed: int = 0) -> dict[str, float]:
    """Share of each verdict over n seeds; the differences, of single runs where unpaired, are normal(mean, sd)."""
    rng = np.random.default_rng(seed)
    spread = sd if paired else sd / np.sqrt(2)
    a = np.zeros((n, simulations)) if paired else spread * rng.standard_normal((n, simulations))
    b = mean + spread * rng.standard_normal((n, simulations))
    d = stats.difference(a, b, paired=paired)
    said = stats.verdict(d, MARGIN)
    return {word: float(np.mean(said == word)) for word in (stats.EQUIVALENT, stats.DIFFERENT)}


def verdict_of(d: np.ndarray) -> str:
    return str(stats.verdict(stats.difference(np.zeros(len(d)), d, paired=True), MARGIN))


def one_by_one(*, mean: float, sd: float, simulations: int, seed: int = 0) -> dict[str, float]:
    """Share of each verdict where seeds are added, from 3 to 12, until one comes: peeking costs some of the 5 %."""
    d = mean + sd * np.random.default_rng(seed).standard_normal((simulations, MOST))
    said = []
    for seeds in d:
        tried = (verdict_of(seeds[:n]) for n in range(3, MOST + 1))
        said.append(next((word for word in tried if word != stats.UNDECIDED), stats.UNDECIDED))
    return {word: said.count(word) / simulations for word in (stats.EQUIVALENT, stats.DIFFERENT)}


def as_advised(*, mean: float, sd: float, simulations: int, first: int = 3, seed: int = 0) -> float:
    """Share of undecided comparisons of 3 seeds that the advised number of further seeds settles."""
    rng = np.random.default_rng(seed)
    settled = []
    for d in mean + sd * rng.standard_normal((simulations, first)):
        if verdict_of(d) != stats.UNDECIDED:
            continue
        need = stats.seeds_needed(d.mean(), d.std(ddof=1), MARGIN)
        if need is not None:
            more = mean + sd * rng.standard_normal(max(need - first, 1))
            whole = np.concatenate([d, more])
            settled.append(verdict_of(whole) != stats.UNDECIDED)
    return float(np.mean(settled))


INTERVALS = {"mean gap": stats.mean_interval, "median ratio": stats.median_interval}


def row(what: str, case: str, wanted: str, share: float) -> dict:
    return {"what": what, "case": case, "should be": wanted, "is": round(share, 3)}


def interval_rows(simulations: int) -> list[dict]:
    return [
        row(f"interval of the {name}", f"AR(1) {rho}", "0.95", coverage(f, rho=rho, simulations=simulations))
        for name, f in INTERVALS.items()
        for rho in (0.0, 0.5, 0.9, 0.95)
    ]


def verdict_rows(simulations: int) -> list[dict]:
    rows = []
    for paired in (True, False):
        for n in (2, 3, 5, 10):
            how, name = {"paired": paired, "simulations": simulations}, f"seeds: {n}{'' if paired else ', unpaired'}"
            on_margin = verdicts(n, mean=MARGIN, sd=MARGIN / 2, **how)
            rows += [row(f'false "{w}"', f"{name}, on the margin", "<= 0.05", share) for w, share in on_margin.items()]
            for sd in (0.25, 0.5, 1.0):
                predicted, _ = stats.verdict_power(n, mean=0, sd=sd, margin=MARGIN)
                share = verdicts(n, mean=0, sd=sd, **how)[stats.EQUIVALENT]
                rows.append(row('power of "equivalent"', f"{name}, spread {sd} margins", f"{predicted:.3f}", share))
    return rows


def adaptive_rows(simulations: int) -> list[dict]:
    peeking = one_by_one(mean=MARGIN, sd=MARGIN / 2, simulations=simulations)
    name = f"seeds added one by one, 3 to {MOST}"
    rows = [row(f'false "{w}"', f"{name}, on the margin", "> 0.05", share) for w, share in peeking.items()]
    advised = as_advised(mean=0.0, sd=MARGIN, simulations=simulations)
    return [*rows, row("settled by the advised seeds", "after 3, spread 1.0 margins", "0.8", advised)]


def render(rows: list[dict]) -> str:
    return table([list(rows[0]), *([str(value) for value in row.values()] for row in rows)])


def main(options: Options) -> None:
    n = options.simulations
    rows = interval_rows(n) + verdict_rows(20 * n) + adaptive_rows(n // 10)
    print(render(rows))
    if options.to:
        write(options.to, rows)


if __name__ == "__main__":
    run_script(main, Options, __doc__)
