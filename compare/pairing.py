"""Which runs are variants of each other, which are the same, and which may be held against which."""

from dataclasses import dataclass, field

from records import COMMIT, SEED_KEYS, SIBLING_KEYS, RunRecord

RECORDED = ("data.corpus", "environment.")  # settings that an old or damaged environment.json may lack


@dataclass
class Variant:
    """Runs that differ by nothing but seeds."""

    label: str
    values: dict
    """What tells it from the other variants: setting -> value."""
    runs: list[RunRecord] = field(default_factory=list)
    """One for each pair of seeds."""
    spare: list[RunRecord] = field(default_factory=list)
    """Runs of the same settings and seeds as one of `runs`."""

    @property
    def counted(self) -> list[RunRecord]:
        """Those that did not diverge and are as long as the longest of these: what statistics are made of."""
        whole = [run for run in self.runs if run.diverged_at is None]
        longest = max((run.last_step for run in whole), default=0)
        return [run for run in whole if run.last_step == longest]


def differing_keys(runs: list[RunRecord]) -> list[str]:
    """Settings that are not the same in all runs: norm and placement first, seeds last, the commit if nothing else."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    differing = []
    for key in keys:
        values = [run.settings.get(key) for run in runs]
        unknown = key.startswith(RECORDED) and None in values
        if not unknown and any(value != values[0] for value in values):
            differing.append(key)
    rank = {**dict.fromkeys(SIBLING_KEYS, 0), **dict.fromkeys(SEED_KEYS, 2)}
    return sorted([key for key in differing if key != COMMIT] or differing, key=lambda key: rank.get(key, 1))


def group(runs: list[RunRecord], differing: list[str]) -> list[Variant]:
    """Variants in the order of their first runs. Where seeds alone differ, each seed is one: that is the noise.

    Of runs with the same settings and seeds one counts, for the same numbers are no other seed: the last of all that
    were given, else the longest.
    """
    keys = [key for key in differing if key not in SEED_KEYS] or differing
    variants: dict[tuple, Variant] = {}
    for run in runs:
        values = {key: run.settings.get(key) for key in keys}
        variant = variants.setdefault(tuple(map(str, values.values())), Variant(variant_label(run, keys), values))
        variant.runs.append(run)
    for variant in variants.values():
        best: dict[tuple, RunRecord] = {}
        for run in sorted(variant.runs, key=lambda run: (run is runs[-1], run.last_step), reverse=True):
            best.setdefault(run.seeds, run)
        counting = [run for run in variant.runs if run is best[run.seeds]]
        variant.spare = [run for run in variant.runs if run is not best[run.seeds]]
        variant.runs = counting
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
    pairs: list[tuple[int, int]] = []
    for b, candidate in enumerate(variants):
        by_key: dict[str, int] = {}
        for a in range(b):
            keys = [key for key, value in candidate.values.items() if variants[a].values[key] != value]
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

    @property
    def runs(self) -> list[RunRecord]:
        return self.a + self.b


def pair(a: Variant, b: Variant) -> Pairing:
    """Runs of equal seeds and batches where there are two or more of them, or nothing better; else all of either."""
    if not (a.counted and b.counted):  # all of one diverged: shown up to there
        return Pairing(a.runs[:1], b.runs[:1], *_same(a.runs[0], b.runs[0]))
    by_seed = {run.seeds: run for run in b.counted}
    matched = [(run, by_seed[run.seeds]) for run in a.counted if run.seeds in by_seed]
    if not matched and len(a.counted) == len(b.counted) == 1:
        matched = [(a.counted[0], b.counted[0])]
    same = [_same(*both) for both in matched]
    if matched and all(paired for paired, _ in same) and (len(matched) > 1 or min(len(a.counted), len(b.counted)) < 2):
        twins = [(_beside(y, [x, *a.spare]), y) for x, y in matched]
        return Pairing(*map(list, zip(*twins, strict=True)), True, same[0][1] + _repeated(twins))
    words = next((words for paired, words in same if not paired), "too few seeds in common: unpaired")
    return Pairing(a.counted, b.counted, False, words)


def _same(a: RunRecord, b: RunRecord) -> tuple[bool, str]:
    if a.same_batches is None or b.same_batches is None:
        return False, "batches not on record: unpaired"
    if a.same_batches != b.same_batches:
        return False, "other batches: unpaired"
    return True, "on the same batches" + ("" if a.seeds == b.seeds else ", from other initial weights")


def _beside(b: RunRecord, candidates: list[RunRecord]) -> RunRecord:
    """Of the first and those equal to it, the one that was trained in lockstep with b, where there is one."""
    first = candidates[0]
    equal = [run for run in candidates if run.seeds == first.seeds and run.last_step == first.last_step]
    return next((run for run in equal if lockstep(run, b)), first)


def _repeated(pairs: list[tuple[RunRecord, RunRecord]]) -> str:
    columns = zip(*(b.seeds for _, b in pairs), strict=True)
    repeated = [key for key, values in zip(SEED_KEYS, columns, strict=True) if len(set(values)) < len(values)]
    return f"; {' and '.join(repeated)} repeat, so the pairs are not independent" if repeated else ""


def lockstep(a: RunRecord, b: RunRecord) -> bool:
    """Whether the two were trained by one process, step by step in turn."""
    together = {a.name, b.name} <= set(a.environment.get("lockstep") or [])
    return together and a.environment.get("started") == b.environment.get("started")
