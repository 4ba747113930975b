"""The table that a run ends with."""

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from compare.runs import RunRecord
from compare.stats import Gap, Ratio, loss_gap, step_time_ratio


def _number(value: float | None, digits: int) -> str:
    return "n/a" if value is None else f"{value:,.{digits}f}"


ROWS = {
    "train loss (nats/token)": lambda s: _number(s["train/loss"], 4),
    "validation loss (nats/token)": lambda s: _number(s["val/loss"], 4),
    "bits per byte": lambda s: _number(s["val/bpb"], 4),
    "step, median ms": lambda s: _number(s["time/step_ms"], 1),
    "step, p10 to p90 ms": lambda s: f"{_number(s['time/step_ms_p10'], 1)} to {_number(s['time/step_ms_p90'], 1)}",
    "tokens/s": lambda s: _number(s["time/tokens_per_s"], 0),
    "peak memory (MiB)": lambda s: _number(s["peak_memory_mib"], 0),
}


def summary_table(summaries: dict[str, dict]) -> Table:
    """One column a run; `summaries` is label -> summary.json."""
    table = Table("", *summaries, title=None)
    for name, cell in ROWS.items():
        table.add_row(name, *(cell(summary) for summary in summaries.values()))
    return table


def gap_sentences(
    gap: Gap | None, ratio: Ratio | None, *, candidate: str, baseline: str, tolerance: float
) -> list[str]:
    """What separates the candidate from the baseline, in words that claim no more than was measured."""
    if gap is None:
        return [f"{candidate} against {baseline}: no step after warm-up to compare"]
    interval = (
        "too few steps for an interval" if gap.interval is None else "95 % {:+.4f} to {:+.4f}".format(*gap.interval)
    )
    lines = [
        f"gap       {gap.gap:+.4f} nats/token ({interval}): {candidate} minus {baseline}, mean over the last half",
        f"gap_abs   {gap.gap_abs:.4f} nats/token, mean over {gap.n_steps} steps after warm-up",
        f"overlap   {gap.overlap:.1%} of these steps within {tolerance} nats; no seed noise measured",
        "          The interval describes this pair of runs. One seed cannot tell the norms apart.",
    ]
    if ratio is None:
        return [*lines, "step time ratio not measured: too few timed steps"]
    low, high = ratio.interval
    return [*lines, f"step time ratio {ratio.median:.3f} (95 % {low:.3f} to {high:.3f}), steps interleaved"]


def compare_pair(candidate: RunRecord, baseline: RunRecord) -> tuple[Gap | None, Ratio | None]:
    """Gap and step-time ratio of two runs on the same batches, over the steps that both have."""
    n = min(len(candidate.loss), len(baseline.loss))
    a, b = baseline, candidate
    gap = loss_gap(a.loss[:n], b.loss[:n], warmup=b.warmup, tolerance=b.config["compare"]["tolerance"])
    return gap, step_time_ratio(a.step_ms[:n], b.step_ms[:n])


def print_summary(
    summaries: dict[str, dict], sentences: list[str], samples: dict[str, str], folders: list[str]
) -> None:
    parts = [summary_table(summaries), *(Text(line) for line in sentences)]
    for label, sample in samples.items():
        parts += [Text(f"\n{label} writes:", style="bold"), Text(sample)]
    Console(soft_wrap=True, highlight=False).print(Group(*parts, Text(f"\nruns: {' '.join(folders)}")))
