"""Runs held against each other: what differs, which of them pair, how far apart they are, and what that allows to say.

`compare(runs)` returns compare.json: plain values that hold all that the table, the picture and the report show.
"""

import json
from dataclasses import asdict, dataclass
from itertools import combinations

import numpy as np

from compare import stats
from compare.runs import COMMIT, SEED_KEYS, SIBLING_KEYS, RunRecord, summarize
from compare.series import binned, rounded, variant_series
from errors import UserError
from files import finite

TOLERANCE, MARGIN = 0.02, 0.01
SAME_MACHINE = ("device", "cpu", "cpu_count", "threads", "machine")
SAME_VERSIONS = ("python", "torch", "triton")


@dataclass
class Variant:
    """Runs that differ by nothing but seeds."""

    label: str
    values: dict
    """What tells it from the other variants: setting -> value."""
    runs: list[RunRecord]

    @property
    def whole(self) -> list[RunRecord]:
        """Those that did not diverge."""
        return [run for run in self.runs if run.diverged_at is None]


def compare(
    runs: list[RunRecord], *, margin: float | None = None, tolerance: float | None = None, last_only: bool = False
) -> dict:
    """Compares two or more runs: each variant with those before it that are one setting away, or the last run's alone.

    `margin` and `tolerance`, nats per token, are the last run's own where not given. UserError for fewer than two runs.
    """
    last = runs[-1] if runs else None
    runs, notes = one_of_each(runs)
    if len(runs) < 2:
        raise UserError("a comparison needs two runs that differ; one is only itself")
    settings = {"margin": MARGIN, "tolerance": TOLERANCE} | runs[-1].config.get("compare", {})
    given = {"margin": margin, "tolerance": tolerance}
    settings = {key: settings[key] if value is None else value for key, value in given.items()}

    differing = differing_keys(runs)
    variants = group(runs, differing)
    if last_only:
        variants.sort(key=lambda v: all(last.settings.get(key) == value for key, value in v.values.items()))
    unit = "bits/byte" if len({_tokenizer(run) for run in runs}) > 1 else "nats/token"
    if unit == "bits/byte":
        notes.append("the tokenizers differ, so losses are in bits per byte; margin and tolerance are converted")
    if len({run.settings[COMMIT] for run in runs}) > 1:
        notes.append("the runs were made by different commits of the code")
    notes += [f"{_name(run)} diverged at step {run.diverged_at}" for run in runs if run.diverged_at is not None]
    notes += [f"{_name(run)} is {run.status} at step {run.last_step}" for run in runs if run.status in UNFINISHED]
    notes += [
        f"{_name(run)}/metrics.jsonl cannot be read from line {run.damaged_line} on: its curves end there"
        for run in runs
        if run.damaged_line
    ]
    return finite(
        {
            "differs": {key: [v.values.get(key) for v in variants] for key in differing if key in variants[0].values},
            "unit": unit,
            "margin": settings["margin"],
            "tolerance": settings["tolerance"],
            "notes": notes,
            "variants": [describe(variant, unit) for variant in variants],
            "comparisons": [
                compare_variants(variants[a], variants[b], unit=unit, **settings)
                for a, b in partners(variants)
                if b == len(variants) - 1 or not last_only
            ],
            "command": runs[-1].environment.get("command"),
            "environment": {k: v for k, v in runs[-1].environment.items() if k not in NOT_SHOWN},
        }
    )


NOT_SHOWN = ("command", "batch_hashes", "before", "lockstep")
UNFINISHED = ("unfinished", "interrupted", "failed")


def _name(run: RunRecord) -> str:
    return run.folder.name


def _tokenizer(run: RunRecord) -> str:
    record = run.environment.get("data", {}).get("tokenizer") or {}
    return record.get("sha256") or run.config["data"]["tokenizer"]


# grouping and pairing


def one_of_each(runs: list[RunRecord]) -> tuple[list[RunRecord], list[str]]:
    """Leaves out what is the same run once more: the same numbers must not count as another seed.

    Of equal runs the longest is kept, or else the one whose twin, trained in lockstep, is among the runs as well.
    """
    names = {_name(run) for run in runs}

    def worth(run: RunRecord) -> tuple[int, int]:
        return run.last_step, len(names & set(run.environment.get("lockstep", [])))

    equal: dict[str, list[RunRecord]] = {}
    for run in runs:
        equal.setdefault(json.dumps(run.settings, sort_keys=True), []).append(run)
    kept = [max(same, key=worth) for same in equal.values()]
    return kept, [
        f"{_name(run)} is the same run as {_name(best)}, and left out"
        for best, same in zip(kept, equal.values(), strict=True)
        for run in same
        if run is not best
    ]


def differing_keys(runs: list[RunRecord]) -> list[str]:
    """Settings that are not the same in all runs: norm and placement first, seeds last, the commit if nothing else."""
    first = runs[0].settings
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    differing = [key for key in keys if any(run.settings.get(key) != first.get(key) for run in runs)]
    rank = {**dict.fromkeys(SIBLING_KEYS, 0), **dict.fromkeys(SEED_KEYS, 2)}
    return sorted([key for key in differing if key != COMMIT] or differing, key=lambda key: rank.get(key, 1))


def group(runs: list[RunRecord], differing: list[str]) -> list[Variant]:
    """Variants in the order of their first runs. Where seeds alone differ, each seed is one: that is the noise."""
    keys = [key for key in differing if key not in SEED_KEYS] or differing
    variants: dict[tuple, Variant] = {}
    for run in runs:
        values = {key: run.settings.get(key) for key in keys}
        variant = variants.setdefault(tuple(map(str, values.values())), Variant(variant_label(run, keys), values, []))
        variant.runs.append(run)
    return list(variants.values())


def variant_label(run: RunRecord, keys: list[str]) -> str:
    """rmsnorm-pre, then what else tells it apart."""
    others = [key for key in keys if key not in SIBLING_KEYS]
    named = [run.label] if len(others) < len(keys) or set(keys) <= set(SEED_KEYS) else []
    return ", ".join([*named, *(f"{key.rpartition('.')[2]}={_short(run.settings.get(key))}" for key in others)])


def _short(value) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def partners(variants: list[Variant]) -> list[tuple[int, int]]:
    """Which variants to compare, (baseline, candidate): those one setting apart, against that setting's first value.

    A variant that is more than one setting away from every earlier one is compared with the first.
    """

    def apart(a: Variant, b: Variant) -> tuple[str, ...]:
        return tuple(key for key in a.values if a.values[key] != b.values[key])

    pairs: list[tuple[int, int]] = []
    for b, candidate in enumerate(variants):
        by_key: dict[str, int] = {}
        for a in range(b):
            keys = apart(variants[a], candidate)
            if len(keys) == 1:
                by_key.setdefault(keys[0], a)
        pairs += [(a, b) for a in by_key.values()] or ([(0, b)] if b else [])
    return pairs


@dataclass
class Pairing:
    """Which runs of A and B are held against each other."""

    a: list[RunRecord]
    b: list[RunRecord]
    paired: bool
    """Row i of both took the same batches from the same seed, or is the only one."""
    words: str


def pair(a: Variant, b: Variant) -> Pairing:
    """Runs of equal seeds and batches where there are two or more of them, or nothing better; else all of either."""
    if not (a.whole and b.whole):
        return Pairing(a.runs[:1], b.runs[:1], *_same(a.runs[0], b.runs[0]))
    by_seed = {run.seeds: run for run in b.whole}
    matched = [(run, by_seed[run.seeds]) for run in a.whole if run.seeds in by_seed]
    if not matched and len(a.whole) == len(b.whole) == 1:
        matched = [(a.whole[0], b.whole[0])]
    same = [_same(*both) for both in matched]
    if matched and all(paired for paired, _ in same) and (len(matched) > 1 or min(len(a.whole), len(b.whole)) < 2):
        return Pairing(*map(list, zip(*matched, strict=True)), True, same[0][1])
    words = next((words for paired, words in same if not paired), "too few seeds in common: unpaired")
    return Pairing(a.whole, b.whole, False, words)


def _same(a: RunRecord, b: RunRecord) -> tuple[bool, str]:
    if a.same_batches is None or b.same_batches is None:
        return False, "batches are not on record: unpaired"
    if a.same_batches != b.same_batches:
        return False, "other batches: unpaired"
    return True, "on the same batches" + ("" if a.seeds == b.seeds else ", from other initial weights")


# one comparison


def compare_variants(a: Variant, b: Variant, *, unit: str, margin: float, tolerance: float) -> dict:
    """How far candidate B lies from baseline A; None for what cannot be had, with the reason in words."""
    pairing = pair(a, b)
    differs = {key: [a.values[key], b.values[key]] for key in a.values if a.values[key] != b.values[key]}
    scale = _scale(pairing.a[0], unit)
    result = {"baseline": a.label, "candidate": b.label, "differs": differs, "noise": set(differs) <= set(SEED_KEYS)}
    result |= {"pairing": pairing.words, "paired": pairing.paired, "n_seeds": [len(pairing.a), len(pairing.b)]}
    result |= {"diverged": [f"{_name(r)} diverged at step {r.diverged_at}" for r in a.runs + b.runs if r.diverged_at]}
    result |= compare_training(pairing, unit=unit, tolerance=tolerance * scale)
    result |= compare_validation(pairing, unit=unit, margin=margin * scale)
    if result["diverged"] and "verdict" in result:
        result |= {"verdict": "diverged", "more_seeds": None}
    return result | {"step_time_ratio": compare_times(pairing)}


def _scale(run: RunRecord, unit: str) -> float:
    """What turns this run's nats per token into `unit`."""
    return float(np.nanmedian(run.val_bpb / run.val_loss)) if unit == "bits/byte" and len(run.val_loss) else 1.0


def compare_training(pairing: Pairing, *, unit: str, tolerance: float) -> dict:
    """gap, its interval, gap_abs and, over steps, the overlap within the tolerance: training losses after warm-up."""
    runs = pairing.a + pairing.b
    if len({run.tokens_per_step for run in runs}) > 1:
        return {"gap": None, "why_no_gap": "steps of another number of tokens"}
    steps = _common([run.step for run in runs])
    steps = steps[steps > max(run.warmup for run in runs)]
    if not len(steps):
        return {"gap": None, "why_no_gap": "no step after the learning rate's warm-up to compare losses in"}
    a, b = (
        np.array([r.loss[np.searchsorted(r.step, steps)] * _scale(r, unit) for r in side])
        for side in (pairing.a, pairing.b)
    )
    finite = np.isfinite(a).all(axis=0) & np.isfinite(b).all(axis=0)
    if not finite.any():
        return {"gap": None, "why_no_gap": "no step with a finite loss in both"}
    a, b, steps = a[:, finite], b[:, finite], steps[finite]
    d = b - a if pairing.paired else (b.mean(axis=0) - a.mean(axis=0))[None, :]
    gap = stats.gap(d.mean(axis=0), tolerance=tolerance)
    half = len(steps) // 2
    seeds = stats.difference(a[:, half:].mean(axis=1), b[:, half:].mean(axis=1), paired=pairing.paired)
    series = {"step": binned(steps), "gap": binned(d.mean(axis=0))}
    if seeds:
        gap.interval = seeds.interval(0.95)
        band = stats.difference(_rows(a), _rows(b), paired=pairing.paired)
        series["half"] = rounded(band.half_width(0.95))
    gap.gap_abs = float(np.abs(d).mean())
    return {
        "gap": asdict(gap) | {"over": "seeds" if seeds else "steps"},
        "tolerance": tolerance,
        "steps": [int(steps[0]), int(steps[-1])],
        "half_from": int(steps[half]),
        "series": series,
    }


def _rows(curves: np.ndarray) -> np.ndarray:
    return np.array([binned(row, as_list=False) for row in curves])


def _common(axes: list[np.ndarray]) -> np.ndarray:
    """Points that all have: (n,) sorted."""
    common = axes[0]
    for axis in axes[1:]:
        common = common if np.array_equal(common, axis) else np.intersect1d(common, axis)
    return common


def compare_validation(pairing: Pairing, *, unit: str, margin: float) -> dict:
    """Overlap over seeds, the final losses with the verdict, steps and seconds to the same loss."""
    runs = pairing.a + pairing.b
    tokens = _common([run.val_step * run.tokens_per_step for run in runs])
    if not len(tokens):
        return {"final": None, "why_no_final": "no step that all were evaluated at"}

    def at(side: list[RunRecord], points: np.ndarray, values) -> np.ndarray:
        rows = [np.searchsorted(run.val_step * run.tokens_per_step, points) for run in side]
        return np.array([values(run)[row] for run, row in zip(side, rows, strict=True)])

    a, b = (at(side, tokens, lambda run: run.val_loss * _scale(run, unit)) for side in (pairing.a, pairing.b))
    finite = np.isfinite(a).all(axis=0) & np.isfinite(b).all(axis=0)
    a, b, tokens = a[:, finite], b[:, finite], tokens[finite]
    if not len(tokens):
        return {"final": None, "why_no_final": "no evaluation that is finite in all"}
    result = {"final": {"tokens": int(tokens[-1]), "step": int(tokens[-1] // runs[0].tokens_per_step)}}
    result["final"] |= {"baseline": rounded(a[:, -1]), "candidate": rounded(b[:, -1])}
    result["final"]["difference"] = float(b[:, -1].mean() - a[:, -1].mean())
    if any(run.last_step * run.tokens_per_step > tokens[-1] for run in runs):
        result["final"]["common"] = True
    final = stats.difference(a[:, -1], b[:, -1], paired=pairing.paired)
    result |= {"margin": margin, "verdict": stats.UNDECIDED, "more_seeds": None}
    if final:
        n = min(len(a), len(b))
        result["final"] |= {"interval": final.interval(0.90), "sd": float(final.error * np.sqrt(n))}
        result["verdict"] = stats.verdict(final, margin)
        if result["verdict"] == stats.UNDECIDED:
            need = stats.seeds_needed(float(final.mean), result["final"]["sd"], margin)
            result["more_seeds"] = need and max(need - n, 1)
        after = tokens > max(run.warmup * run.tokens_per_step for run in runs)
        if after.any():
            result["overlap"] = stats.overlap(stats.difference(a[:, after], b[:, after], paired=False))
            if pairing.paired:
                result["overlap_paired"] = stats.overlap(stats.difference(a[:, after], b[:, after], paired=True))
    return result | compare_reach(pairing, at, tokens, a.mean(axis=0), b.mean(axis=0))


def compare_reach(pairing: Pairing, at, tokens: np.ndarray, a: np.ndarray, b: np.ndarray) -> dict:
    """Steps and seconds that B takes to the loss that both reach, over what A takes: ratios under 1 mean sooner.

    The loss is the higher of the two final ones; seconds are those of training steps alone.
    """
    target = max(a[-1], b[-1])
    steps = [stats.first_reached(tokens, curve, target) for curve in (a, b)]
    reach = {"loss": float(target), "steps": steps[1] / steps[0] if all(steps) else None, "seconds": None}
    if comparable_times(pairing) is None:
        after = [
            at(
                side,
                tokens,
                lambda run: np.concatenate([[0.0], run.seconds])[np.searchsorted(run.step, run.val_step, "right")],
            )
            for side in (pairing.a, pairing.b)
        ]
        seconds = [
            stats.first_reached(times.mean(axis=0), curve, target) for times, curve in zip(after, (a, b), strict=True)
        ]
        if all(s and np.isfinite(s) for s in seconds):
            reach["seconds"] = seconds[1] / seconds[0]
    return {"to_loss": reach}


# times


def lockstep(a: RunRecord, b: RunRecord) -> bool:
    """Whether the two were trained by one process, step by step in turn."""
    together = {_name(a), _name(b)} <= set(a.environment.get("lockstep", []))
    return together and a.environment.get("started") == b.environment.get("started")


def comparable_times(pairing: Pairing) -> str | None:
    """Why the step times of A and B must not be compared, or None."""
    runs = pairing.a + pairing.b
    first = runs[0].environment
    for run in runs:
        env = run.environment
        for key in SAME_MACHINE:
            if env.get(key) != first.get(key):
                return f"another {key}"
        for key in SAME_VERSIONS:
            if env.get("versions", {}).get(key) != first.get("versions", {}).get(key):
                return f"another version of {key}"
    for x, y in combinations(runs, 2):
        (x_from, x_to), (y_from, y_to) = ((r.environment.get("started"), r.summary.get("ended")) for r in (x, y))
        if all((x_from, x_to, y_from, y_to)) and x_from < y_to and y_from < x_to and not lockstep(x, y):
            return "runs that ran beside each other on one machine"
    return None


def compare_times(pairing: Pairing) -> dict:
    """Step time of B over that of A; over steps in turn for one pair of twins, over pairs or seeds for several."""
    why = comparable_times(pairing)
    if why:
        return {"ratio": None, "why": why}
    n = min(len(pairing.a), len(pairing.b))
    if pairing.paired and all(map(lockstep, pairing.a, pairing.b)):
        found = [stats.step_time_ratio(*_timed(a, b)) for a, b in zip(pairing.a, pairing.b, strict=True)]
        if not all(found):
            return {"ratio": None, "why": "too few timed steps"}
        if n == 1:
            return {"ratio": found[0].median, "interval": found[0].interval, "how": "interleaved", "n": 1}
        logs = np.log([ratio.median for ratio in found])
        how, over = "interleaved", stats.difference(np.zeros(n), logs, paired=True)
    else:
        medians = [
            [float(np.nanmedian(r.step_ms)) if np.isfinite(r.step_ms).any() else np.nan for r in side]
            for side in (pairing.a, pairing.b)
        ]
        a, b = np.log(medians[0]), np.log(medians[1])
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            return {"ratio": None, "why": "too few timed steps"}
        how, over = "separate runs", stats.difference(a, b, paired=False)
        logs = [b.mean() - a.mean()]
    interval = tuple(float(x) for x in np.exp(over.interval(0.95))) if over else None
    return {"ratio": float(np.exp(np.mean(logs))), "interval": interval, "how": how, "n": n}


def _timed(a: RunRecord, b: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    steps = _common([a.step, b.step])
    return a.step_ms[np.searchsorted(a.step, steps)], b.step_ms[np.searchsorted(b.step, steps)]


# what is shown of each variant


def describe(variant: Variant, unit: str) -> dict:
    """One row of the table, and the curves of the figures."""
    runs = []
    for run in variant.runs:
        runs.append({"name": _name(run), "seed": run.seeds[0], "data_seed": run.seeds[1], "status": run.status})
        runs[-1] |= {"diverged_at": run.diverged_at} | run.summary | summarize(run)
    return {
        "label": variant.label,
        "values": variant.values,
        "config": variant.runs[0].config,
        "runs": runs,
        "series": variant_series(variant.runs, [_scale(run, unit) for run in variant.runs]),
    }
