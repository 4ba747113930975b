"""Runs held against each other: how far apart they are, and what seeds and times allow to say of it.

`compare(runs)` returns compare.json: plain values that hold all that the table, the picture and the report show.
"""

from dataclasses import asdict
from itertools import combinations

import numpy as np

from compare import stats
from compare.pairing import Pairing, Variant, differing_keys, group, lockstep, pair, partners
from compare.series import binned, rounded, seconds_at_evaluations, variant_series
from errors import UserError
from files import finite
from records import COMMIT, SEED_KEYS, RunRecord, summarize

TOLERANCE, MARGIN = 0.02, 0.01
SAME_MACHINE = ("device", "cpu", "cpu_count", "threads", "openmp", "machine")
SAME_VERSIONS = ("python", "torch", "triton")
NOT_SHOWN = ("command", "batch_hashes", "before", "lockstep")
FEW_STEPS = 50
BUSY = ", for another process had the cores: leave it one by OMP_NUM_THREADS"
UNFINISHED = ("unfinished", "interrupted", "failed")


def compare(
    runs: list[RunRecord], *, margin: float | None = None, tolerance: float | None = None, last_only: bool = False
) -> dict:
    """Compares two or more runs: each variant with those before it that are one setting away, or the last run's alone.

    `margin` and `tolerance`, nats per token, are the last run's own where not given. UserError for fewer than two runs.
    """
    differing = differing_keys(runs)
    variants = group(runs, differing) if differing else []
    if sum(len(variant.runs) for variant in variants) < 2:
        raise UserError("a comparison needs two runs that differ; one is only itself")
    last = runs[-1]
    if last_only:
        variants.sort(key=lambda variant: last in variant.runs)
    own = {"margin": MARGIN, "tolerance": TOLERANCE} | (last.config.get("compare") or {})
    unit = "bits/byte" if len(_tokenizers(runs)) > 1 else "nats/token"
    # one margin for all, by the tokenizer of the longest tokens: the strictest
    scale = min((s for s in (_scale(run, unit) for run in runs) if np.isfinite(s)), default=1.0)
    limits = {
        "margin": scale * (own["margin"] if margin is None else margin),
        "tolerance": scale * (own["tolerance"] if tolerance is None else tolerance),
    }
    result = {
        "differs": {key: [v.values[key] for v in variants] for key in differing if key in variants[0].values},
        "unit": unit,
        **limits,
        "notes": notes(variants, unit, limits["margin"]),
        "variants": [describe(variant, unit) for variant in variants],
        "comparisons": [
            compare_variants(variants[a], variants[b], unit=unit, **limits)
            for a, b in partners(variants)
            if b == len(variants) - 1 or not last_only
        ],
        "command": last.environment.get("command"),
        "environment": {k: v for k, v in last.environment.items() if k not in NOT_SHOWN},
    }
    return finite(result)


def notes(variants: list[Variant], unit: str, margin: float) -> list[str]:
    """What a reader must know of the runs besides the figures."""
    said = []
    if unit == "bits/byte":
        said.append(f"the tokenizers differ, so losses are in bits per byte, and the margin is {margin:.2g} of them")
    if len({run.settings[COMMIT] for variant in variants for run in variant.runs}) > 1:
        said.append("the runs were made by different commits of the code")
    for variant in variants:
        for run in variant.runs:
            left_out = "" if run in variant.counted else ", and is left out"
            if run.diverged_at is not None:
                said.append(f"{run.name} diverged at step {run.diverged_at}")
            elif run.status in UNFINISHED or left_out:
                said.append(f"{run.name} is {run.status} at step {run.last_step}{left_out}")
            holes = int((~np.isfinite(run.loss)).sum())
            if holes and run.diverged_at is None:
                said.append(f"{run.name} has no finite loss at {holes} of its steps, which are left out")
            if run.damage:
                said.append(f"{run.name}/metrics.jsonl {run.damage}")
        for run in variant.spare:
            said.append(f"{run.name} has the settings and seeds of another run, and counts no second time")
    return said


def _tokenizers(runs: list[RunRecord]) -> set[str]:
    hashes = {((run.environment.get("data") or {}).get("tokenizer") or {}).get("sha256") for run in runs}
    return {run.config["data"]["tokenizer"] for run in runs} if None in hashes else hashes


def _scale(run: RunRecord, unit: str) -> float:
    """What turns this run's nats per token into `unit`, by its validation text; NaN where it was not evaluated."""
    if unit == "nats/token":
        return 1.0
    ratios = (run.val_bpb / run.val_loss)[np.isfinite(run.val_bpb) & (run.val_loss > 0)]
    return float(np.median(ratios)) if len(ratios) else np.nan


def describe(variant: Variant, unit: str) -> dict:
    """One row of the table, and the curves of the figures."""
    runs = []
    for run in variant.runs:
        about = {"name": run.name, "seed": run.seeds[0], "data_seed": run.seeds[1], "status": run.status}
        about |= {"diverged_at": run.diverged_at, "counted": run in variant.counted}
        runs.append(run.summary | summarize(run) | about)
    return {
        "label": variant.label,
        "values": variant.values,
        "config": variant.runs[0].config,
        "runs": runs,
        "series": variant_series(variant.runs, [_scale(run, unit) for run in variant.runs]),
    }


# one comparison


def compare_variants(a: Variant, b: Variant, *, unit: str, margin: float, tolerance: float) -> dict:
    """How far candidate B lies from baseline A; None for what cannot be had, with the reason in words."""
    pairing = pair(a, b)
    differs = {key: [a.values[key], b.values[key]] for key in a.values if a.values[key] != b.values[key]}
    sides = ((a, pairing.a), (b, pairing.b))
    result = {
        "baseline": a.label,
        "candidate": b.label,
        "differs": differs,
        "noise": set(differs) <= set(SEED_KEYS),
        "pairing": pairing.words,
        "paired": pairing.paired,
        "n_seeds": [len(pairing.a), len(pairing.b)],
        "alone": [r.name for v, used in sides for r in v.counted if r.seeds not in {u.seeds for u in used}],
        "diverged": [
            f"{r.name} diverged at step {r.diverged_at}" for r in a.runs + b.runs if r.diverged_at is not None
        ],
    }
    result |= compare_training(pairing, unit=unit, tolerance=tolerance)
    times = compare_times(pairing)
    result |= compare_validation(pairing, unit=unit, margin=margin, timed="why" not in times)
    result["step_time_ratio"] = times
    if result["diverged"]:
        result |= {"verdict": "diverged", "more_seeds": None}
    if not (a.counted and b.counted):  # all of one diverged
        result["alone"] = []
        if result["gap"] and result["gap"]["n_steps"] < FEW_STEPS:
            result |= {"gap": None, "why_no_gap": "diverged before there was a curve to compare"}
    return result


def _common(axes: list[np.ndarray]) -> np.ndarray:
    """Points that all have: (n,) sorted."""
    common = axes[0]
    for axis in axes[1:]:
        common = common if np.array_equal(common, axis) else np.intersect1d(common, axis)
    return common


def compare_training(pairing: Pairing, *, unit: str, tolerance: float) -> dict:
    """gap, its interval, gap_abs and, over steps, the overlap within the tolerance: training losses after warm-up."""
    if len({run.tokens_per_step for run in pairing.runs}) > 1:
        return {"gap": None, "why_no_gap": "steps of another number of tokens"}
    if unevaluated := [run.name for run in pairing.runs if np.isnan(_scale(run, unit))]:
        return {"gap": None, "why_no_gap": f"{unevaluated[0]} was never evaluated, so its bits per byte are unknown"}
    steps = _common([run.step for run in pairing.runs])
    steps = steps[steps > max(run.warmup for run in pairing.runs)]
    a, b = (
        np.array([run.loss[np.searchsorted(run.step, steps)] * _scale(run, unit) for run in side])
        for side in (pairing.a, pairing.b)
    )
    known = np.isfinite(a).all(axis=0) & np.isfinite(b).all(axis=0)
    if not known.any():
        return {"gap": None, "why_no_gap": "no step after the learning rate's warm-up to compare losses in"}
    a, b, steps = a[:, known], b[:, known], steps[known]
    d = b - a if pairing.paired else (b.mean(axis=0) - a.mean(axis=0))[None, :]
    gap = stats.gap(d.mean(axis=0), tolerance=tolerance)
    gap.gap_abs = float(np.abs(d).mean())
    half = len(steps) // 2
    series = {"step": binned(steps), "gap": binned(d.mean(axis=0))}
    seeds = stats.difference(a[:, half:].mean(axis=1), b[:, half:].mean(axis=1), paired=pairing.paired)
    if seeds:
        gap.interval = seeds.interval(0.95)
        rows = [np.array([binned(row, as_list=False) for row in side]) for side in (a, b)]
        series["half"] = rounded(stats.difference(*rows, paired=pairing.paired).half_width(0.95))
    return {
        "gap": asdict(gap) | {"over": "seeds" if seeds else "steps"},
        "tolerance": tolerance,
        "steps": [int(steps[0]), int(steps[-1])],
        "half_from": int(steps[half]),
        "series": series,
    }


def compare_validation(pairing: Pairing, *, unit: str, margin: float, timed: bool) -> dict:
    """Overlap over seeds, the final losses with the verdict, steps and, where `timed`, seconds to the same loss."""
    runs, nothing = pairing.runs, {"final": None, "verdict": None, "more_seeds": None, "margin": margin}
    if len({run.settings["data.corpus"] for run in runs} - {None}) > 1:
        return nothing | {"why_no_final": "the runs validate on different texts"}
    tokens = _common([run.val_step * run.tokens_per_step for run in runs])

    def at_tokens(side: list[RunRecord], values) -> np.ndarray:
        """(runs, n): `values` of each run, one for each of its evaluations, at the common ones."""
        return np.array([values(r)[np.searchsorted(r.val_step * r.tokens_per_step, tokens)] for r in side])

    a, b = (at_tokens(side, lambda run: run.val_loss * _scale(run, unit)) for side in (pairing.a, pairing.b))
    known = np.isfinite(a).all(axis=0) & np.isfinite(b).all(axis=0)
    after = known & (tokens > max(run.warmup * run.tokens_per_step for run in runs))
    if not after.any():
        return nothing | {"why_no_final": "no evaluation after the learning rate's warm-up that all have"}
    end = tokens[after][-1]
    a_end, b_end = a[:, after][:, -1], b[:, after][:, -1]
    final = {
        "step": int(end // pairing.a[0].tokens_per_step),
        "is_end": not any(run.last_step * run.tokens_per_step > end for run in runs),
        "baseline": rounded(a_end),
        "candidate": rounded(b_end),
        "difference": float(b_end.mean() - a_end.mean()),
    }
    result = nothing | {"final": final, "verdict": stats.UNDECIDED}
    over_seeds = stats.difference(a_end, b_end, paired=pairing.paired)
    if over_seeds:
        final |= {"interval": over_seeds.interval(0.90), "sd": float(over_seeds.spread)}
        result["verdict"] = str(stats.verdict(over_seeds, margin))
        if result["verdict"] == stats.UNDECIDED:
            need, n = stats.seeds_needed(float(over_seeds.mean), final["sd"], margin), min(len(a), len(b))
            result["more_seeds"] = need and max(need - n, 1)
        for key, paired in [("overlap", False), ("overlap_paired", True)][: 1 + pairing.paired]:
            result[key] = stats.overlap(stats.difference(a[:, after], b[:, after], paired=paired))
    times = None
    if timed:
        times = [at_tokens(side, seconds_at_evaluations)[:, known] for side in (pairing.a, pairing.b)]
    return result | {"to_loss": compare_reach(tokens[known], a[:, known], b[:, known], times, pairing.paired)}


def compare_reach(tokens: np.ndarray, a: np.ndarray, b: np.ndarray, times: list | None, paired: bool) -> dict:
    """Steps and seconds that B takes to the loss that both reach, over what A takes: under 1 is sooner.

    The loss is the higher of the two final ones; seconds are those of training steps. Pairs each have their ratio, and
    over two or more its geometric mean has an interval; else mean curves are compared.
    """
    if not paired:
        a, b = a.mean(axis=0)[None], b.mean(axis=0)[None]
        times = times and [side.mean(axis=0)[None] for side in times]

    def ratio(x_a: np.ndarray, x_b: np.ndarray) -> dict | None:
        logs = []
        for one_a, one_b, at_a, at_b in zip(a, b, x_a, x_b, strict=True):
            target = max(one_a[-1], one_b[-1])
            reached = stats.first_reached(at_a, one_a, target), stats.first_reached(at_b, one_b, target)
            if not all(x and np.isfinite(x) for x in reached):
                return None
            logs.append(np.log(reached[1] / reached[0]))
        over = stats.difference(np.zeros(len(logs)), np.array(logs), paired=True)
        interval = np.exp(over.interval(0.95)).tolist() if over else None
        return {"ratio": float(np.exp(np.mean(logs))), "interval": interval}

    steps = np.broadcast_to(tokens, a.shape)
    return {"steps": ratio(steps, steps), "seconds": ratio(*times) if times else None}


# times


def comparable_times(pairing: Pairing) -> str | None:
    """Why the step times of A and B must not be compared, or None."""
    first = pairing.runs[0].environment
    for run in pairing.runs:
        for made_on in [run.environment, *(run.environment.get("before") or [])]:
            if not isinstance(made_on, dict) or any(made_on.get(key) is None for key in SAME_MACHINE):
                return "the machine is not on record"
            if differing := [key for key in SAME_MACHINE if made_on[key] != first[key]]:
                return f"another {differing[0]}"
            versions = [made_on.get("versions") or {}, first.get("versions") or {}]
            if differing := [key for key in SAME_VERSIONS if versions[0].get(key) != versions[1].get(key)]:
                return f"another version of {differing[0]}"
    for x, y in combinations(pairing.runs, 2):
        if lockstep(x, y):
            continue
        spans = [(run.environment.get("started"), run.summary.get("ended")) for run in (x, y)]
        if not all(time for span in spans for time in span):
            return "when the runs began and ended is not on record"
        if spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]:
            return "the runs ran beside each other"
    return None


def compare_times(pairing: Pairing) -> dict:
    """Step time of B over that of A; over steps in turn for one pair of twins, over pairs or seeds for several.

    "why" says what keeps the times of the trained steps from being compared, be there a ratio or not.
    """
    disturbed = sum(int((run.timed & np.isnan(run.undisturbed_ms)).sum()) for run in pairing.runs)
    nothing = {"ratio": None, "interval": None, "each": [], "disturbed": disturbed}
    if why := comparable_times(pairing):
        return nothing | {"why": why}
    busy = disturbed and all(run.timed.sum() >= 2 * stats.MIN_PAIRS for run in pairing.runs)
    few = nothing | {"why": "too few timed steps" + (BUSY if busy else "")}
    if pairing.paired and all(map(lockstep, pairing.a, pairing.b)):
        twins = list(zip(pairing.a, pairing.b, strict=True))
        found, how = [stats.step_time_ratio(*_timed(a, b)) for a, b in twins], "interleaved"
        if not all(found):
            found, how = [_one_thread_ratio(a, b) for a, b in twins], "one thread"
            nothing = few
        if not all(found):
            return few
        if len(found) == 1:
            return nothing | {"ratio": found[0].median, "interval": found[0].interval, "how": how}
        a, b = np.zeros(len(found)), np.log([ratio.median for ratio in found])
        over, each = stats.difference(a, b, paired=True), rounded(np.exp(b))
    else:
        known = [
            [run.undisturbed_ms[np.isfinite(run.undisturbed_ms)] for run in side] for side in (pairing.a, pairing.b)
        ]
        medians = [[np.median(ms) for ms in side if len(ms)] for side in known]
        if not all(medians):
            return few
        a, b = map(np.log, medians)
        over, how, each = stats.difference(a, b, paired=False), "separate runs", []
    interval = np.exp(over.interval(0.95)).tolist() if over else None
    ratio = float(np.exp(b.mean() - a.mean()))
    return nothing | {"ratio": ratio, "interval": interval, "how": how, "each": each}


def _one_thread_ratio(a: RunRecord, b: RunRecord) -> stats.Ratio | None:
    n = min(len(a.one_thread_ms), len(b.one_thread_ms))
    return stats.step_time_ratio(a.one_thread_ms[:n], b.one_thread_ms[:n])


def _timed(a: RunRecord, b: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    steps = _common([a.step, b.step])
    return a.undisturbed_ms[np.searchsorted(a.step, steps)], b.undisturbed_ms[np.searchsorted(b.step, steps)]
