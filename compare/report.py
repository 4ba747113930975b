"""The table that a run ends with."""

from dataclasses import asdict
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from compare.runs import RunRecord
from compare.stats import loss_gap, step_time_ratio


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
    "peak memory of the process (MiB)": lambda s: _number(s["process_peak_mib"], 0),
}


def summary_table(summaries: list[dict]) -> Table:
    """One column a run; each entry is a summary.json."""
    table = Table("", *(s["label"] for s in summaries))
    for name, cell in ROWS.items():
        cells = [cell(summary) for summary in summaries]
        if not (name.startswith("peak") and set(cells) == {"n/a"}):
            table.add_row(name, *cells)
    return table


def compare_pair(candidate: RunRecord, baseline: RunRecord) -> dict:
    """Gap and step-time ratio of two runs on the same batches, over the steps that both have, as plain values."""
    n = min(len(candidate.loss), len(baseline.loss))
    tolerance = candidate.config["compare"]["tolerance"]
    gap = loss_gap(baseline.loss[:n], candidate.loss[:n], warmup=candidate.warmup, tolerance=tolerance)
    ratio = step_time_ratio(baseline.step_ms[:n], candidate.step_ms[:n])
    return {
        "candidate": candidate.label,
        "baseline": baseline.label,
        "tolerance": tolerance,
        "gap": gap and asdict(gap),
        "step_time_ratio": ratio and asdict(ratio),
    }


def comparison_sentences(comparison: dict) -> list[str]:
    """A `compare_pair` in words that claim no more than was measured."""
    gap, ratio = comparison["gap"], comparison["step_time_ratio"]
    lines = ["{candidate} minus {baseline}, on the same batches:".format(**comparison)]
    if gap is None:
        lines.append("  no step after the learning rate's warm-up to compare losses in")
    else:
        known = gap["interval"] is not None
        interval = "95 % {:+.4f} to {:+.4f}".format(*gap["interval"]) if known else "too few steps for an interval"
        lines += [
            f"  gap              {gap['gap']:+.4f} nats/token ({interval}), mean over the last half",
            f"  gap_abs          {gap['gap_abs']:.4f} nats/token, mean over {gap['n_steps']} steps after warm-up",
            f"  overlap          {gap['overlap']:.1%} of these steps within {comparison['tolerance']} nats/token",
            "  No seed noise measured: the interval describes this pair of runs, not the two norms.",
        ]
    if ratio is None:
        lines.append("  step time ratio  not measured: too few timed steps")
    else:
        interval = "95 % {:.3f} to {:.3f}".format(*ratio["interval"])
        lines += [
            f"  step time ratio  {ratio['median']:.3f} ({interval}), steps interleaved",
            "  In this process: where memory happens to lie moves the ratio too, and no interval knows of it.",
        ]
    return lines


def summary(summaries: list[dict], sentences: list[str]) -> Group:
    return Group(summary_table(summaries), *(Text(line) for line in sentences))


def print_summary(summaries: list[dict], sentences: list[str], samples: dict[str, str], folders: list[Path]) -> None:
    parts = [summary(summaries, sentences)]
    for label, sample in samples.items():
        parts += [Text(f"\n{label} writes:", style="bold"), Text(sample)]
    Console(soft_wrap=True, highlight=False).print(*parts, Text(f"\nruns: {' '.join(map(str, folders))}"), sep="\n")
