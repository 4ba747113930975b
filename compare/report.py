"""A comparison in words and tables: what a run ends with, what scripts.compare prints, Markdown for a README."""

import statistics
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from compare.stats import DIFFERENT, EQUIVALENT, MOST_SEEDS, POWER
from files import write_json, write_text


def _number(value: float | None, digits: int) -> str:
    return "n/a" if value is None else f"{value:,.{digits}f}"


def _range(low: float | None, high: float | None) -> str:
    return "n/a" if low is None else f"{low:,.1f} to {high:,.1f}"


def _interval(interval: list[float] | None, form: str = "+.4f", level: int = 95) -> str:
    return f"{level} % {interval[0]:{form}} to {interval[1]:{form}}" if interval else ""


# one run

ROWS = {
    "train loss (nats/token)": lambda s: _number(s["train/loss"], 4),
    "validation loss (nats/token)": lambda s: _number(s["val/loss"], 4),
    "bits per byte": lambda s: _number(s["val/bpb"], 4),
    "step, median ms": lambda s: _number(s["time/step_ms"], 1),
    "step, p10 to p90 ms": lambda s: _range(s["time/step_ms_p10"], s["time/step_ms_p90"]),
    "tokens/s": lambda s: _number(s["time/tokens_per_s"], 0),
    "peak memory (MiB)": lambda s: _number(s.get("peak_memory_mib"), 0),
    "peak memory of the process (MiB)": lambda s: _number(s.get("process_peak_mib"), 0),
}


def summary_table(summaries: list[dict]) -> Table:
    """One column a run; each entry is a summary.json."""
    table = Table("", *(s["label"] for s in summaries))
    for name, cell in ROWS.items():
        cells = [cell(summary) for summary in summaries]
        if not (name.startswith("peak") and set(cells) == {"n/a"}):
            table.add_row(name, *cells)
    return table


# one comparison


def sentences(comparison: dict, unit: str) -> list[str]:
    """One entry of compare.json's "comparisons" in words that claim no more than was measured."""
    c = comparison
    lines = [*c["diverged"], *_loss_lines(c, unit), *_time_lines(c["step_time_ratio"], c["n_seeds"])]
    if c["alone"]:
        lines.append(f"without a partner, and left out: {', '.join(c['alone'])}")
    head = f"{c['candidate']} minus {c['baseline']}, {c['pairing']}:"
    return [head, *(f"  {line}" for line in (*lines, verdict_sentence(c, unit)))]


def _count(n_seeds: list[int], what: str = "seeds") -> str:
    if set(n_seeds) == {1}:
        return f"1 {what.removesuffix('s')}"
    return f"{n_seeds[0]} {what}" if len(set(n_seeds)) == 1 else f"{n_seeds[0]} and {n_seeds[1]} {what}"


def _loss_lines(c: dict, unit: str) -> list[str]:
    lines, gap = [], c["gap"]
    if gap is None:
        lines.append(f"gap              {c['why_no_gap']}")
    else:
        over = f"over {_count(c['n_seeds'])}" if gap["over"] == "seeds" else "over the steps of this pair alone"
        interval = f"{_interval(gap['interval'])} {over}" if gap["interval"] else "no interval under 250 steps"
        steps = "{:,} to {:,}".format(*c["steps"])
        lines += [
            f"gap              {gap['gap']:+.4f} {unit} ({interval}), mean over the last half",
            f"gap_abs          {gap['gap_abs']:.4f} {unit}, mean over steps {steps}, after warm-up",
        ]
        if gap["over"] == "steps":
            within = f"within {c['tolerance']:.3g} {unit}; no seed noise measured"
            lines.append(f"overlap          {gap['overlap']:.1%} of these steps {within}")
    if "overlap" in c:
        paired = f", {c['overlap_paired']:.1%} within that of the pairs" if "overlap_paired" in c else ""
        lines.append(f"overlap          {c['overlap']:.1%} of the evaluations within the noise of the seeds{paired}")
    if c["final"]:
        lines += [f"to equal loss    {line}" for line in [_reach_line(c["to_loss"])] if line]
    return lines


def _reach_line(reach: dict) -> str:
    shares = []
    for what in ("steps", "seconds"):
        if reach[what]:
            interval = reach[what]["interval"]
            shown = f"{reach[what]['ratio']:.3f} of the {what}"
            shares.append(f"{shown} ({_interval(interval, '.3f')})" if interval else shown)
            single = interval is None
    return f"{' and '.join(shares)}{', without an interval' if single else ''}" if shares else ""


HOW = {
    "interleaved": "steps interleaved",
    "one thread": "further steps by one thread, interleaved, in CPU time",
}


def _time_lines(times: dict, n_seeds: list[int]) -> list[str]:
    if times["ratio"] is None:
        return [f"step time ratio  not measured: {times['why']}"]
    interval = f" ({_interval(times['interval'], '.3f')})" if times["interval"] else ""
    head = f"step time ratio  {times['ratio']:.3f}{interval}"
    disturbed = times.get("disturbed", 0)  # results kept before these were counted have none
    left_out = [f"steps left out   {disturbed}, when another process had the cores"] if disturbed else []
    if times["how"] == "separate runs":
        return [f"{head}, separate runs of {_count(n_seeds)}: the machine's drift is in it", *left_out]
    how = HOW[times["how"]]
    if times["each"]:
        each = ", ".join(f"{ratio:.3f}" for ratio in times["each"])
        return [f"{head}, over {len(times['each'])} pairs, {how}: {each}", *left_out]
    return [
        f"{head}, {how}",
        *left_out,
        "In this process, in these minutes: what else the machine does moves the ratio too.",
    ]


def verdict_sentence(comparison: dict, unit: str) -> str:
    """The comparison in one sentence."""
    c, final = comparison, comparison["final"]
    if c["diverged"]:
        return f"No verdict: {'; '.join(c['diverged'])}."
    if final is None:
        return f"No verdict: {c['why_no_final']}."
    where = (
        "final validation loss"
        if final["is_end"]
        else f"validation loss at step {final['step']:,}, the last in common,"
    )
    apart = f"the {where} differs by {final['difference']:+.4f} {unit}"
    if "interval" not in final:
        if c["noise"]:
            return f"This is noise: {apart}, between equal settings."
        return f"No verdict from one seed: {apart}, but one seed cannot tell {c['candidate']} from {c['baseline']}."
    apart = f"over {_count(c['n_seeds'])} {apart} ({_interval(final['interval'], level=90)})"
    margin = f"±{c['margin']:.3g} {unit}"
    if c["verdict"] == EQUIVALENT:
        return f"Equivalent: {apart}, inside {margin}."
    if c["verdict"] == DIFFERENT:
        return f"Different: {apart}, outside {margin}."
    more = f"about {c['more_seeds']} more" if c["more_seeds"] else f"more than {MOST_SEEDS} seeds"
    return f"Not enough seeds: {apart}, neither inside nor outside {margin}; {more} would settle it (power {POWER})."


# all of them


def variant_rows(result: dict) -> tuple[list[str], list[list[str]]]:
    """Header and one row a variant: mean ± standard deviation over the seeds that count."""
    header = ["", "seeds", "validation loss (nats/token)", "bits per byte", "step ms", "ended"]
    body = []
    for variant in result["variants"]:
        runs = variant["runs"]
        counted = [run for run in runs if run["counted"]]
        ends = [f"diverged at step {r['diverged_at']}" if r["diverged_at"] is not None else r["status"] for r in runs]
        seeds = str(len(runs)) if len(counted) == len(runs) else f"{len(counted)} of {len(runs)}"
        cells = [
            _spread(counted, key, digits) for key, digits in (("val/loss", 4), ("val/bpb", 4), ("time/step_ms", 1))
        ]
        body.append([variant["label"], seeds, *cells, ", ".join(dict.fromkeys(ends))])
    return header, body


def comparison_rows(result: dict) -> tuple[list[str], list[list[str]]]:
    """Header and one row a comparison."""
    unit = result["unit"]
    header = ["candidate minus baseline", f"gap ({unit})", f"validation loss ({unit})", "verdict", "step time ratio"]
    body = []
    for c in result["comparisons"]:
        gap, final, times = c["gap"], c["final"], c["step_time_ratio"]
        at = "" if final is None or final["is_end"] else f" at step {final['step']:,}"
        body.append(
            [
                f"{c['candidate']} minus {c['baseline']}",
                _with(f"{gap['gap']:+.4f}", _interval(gap["interval"])) if gap else "n/a",
                _with(f"{final['difference']:+.4f}", _interval(final.get("interval"), level=90)) + at
                if final
                else "n/a",
                _short_verdict(c),
                _ratio_cell(times),
            ]
        )
    return header, body


def _ratio_cell(times: dict) -> str:
    if times["ratio"] is None:
        return "n/a"
    by = ", by one thread" if times["how"] == "one thread" else ""
    return _with(f"{times['ratio']:.3f}", _interval(times["interval"], ".3f")) + by


def _with(value: str, interval: str) -> str:
    return f"{value} ({interval})" if interval else value


def _short_verdict(c: dict) -> str:
    if c["diverged"]:
        return "diverged"
    if c["final"] is None or "interval" not in c["final"]:
        return "noise" if c["noise"] else "one seed" if c["final"] else "n/a"
    return c["verdict"] + (f", {c['more_seeds']} more" if c["more_seeds"] else "")


def _spread(runs: list[dict], key: str, digits: int = 4) -> str:
    values = [run[key] for run in runs if run[key] is not None]
    if not values:
        return "n/a"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def _table(header: list[str], body: list[list[str]]) -> Table:
    table = Table(*header)
    for cells in body:
        table.add_row(*cells)
    return table


def _lines(result: dict) -> list[str]:
    words = [line for c in result["comparisons"] for line in sentences(c, result["unit"])]
    return words + [f"Note: {note}" for note in result["notes"]]


def markdown(result: dict) -> str:
    """Tables and words for a README."""
    lines = []
    for header, body in (variant_rows(result), comparison_rows(result)):
        lines += ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *body)] + [""]
    return "\n".join([*lines, "```text", *_lines(result), "```"]) + "\n"


def shown(result: dict) -> Group:
    """Tables and sentences for a terminal: a column a run for one pair, else a row a variant."""
    if sum(len(v["runs"]) for v in result["variants"]) == 2:
        tables = [summary_table([v["runs"][0] | {"label": v["label"]} for v in result["variants"]])]
    else:
        tables = [_table(*variant_rows(result)), _table(*comparison_rows(result))]
    return Group(*tables, *(Text(line) for line in _lines(result)))


def console(**how) -> Console:
    """Prints names as they are: a folder may be called [b]."""
    return Console(soft_wrap=True, highlight=False, markup=False, emoji=False, **how)


def write_comparison(result: dict, folder: Path, *, figures: bool = True) -> list[Path]:
    """Writes compare.json and compare.md and, with `figures`, compare.png and report.html; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "compare.json", result)
    write_text(folder / "compare.md", markdown(result))
    if not figures:
        return [folder / "compare.json", folder / "compare.md"]
    from compare.figures import draw
    from compare.page import write_page

    draw(result, folder / "compare.png")
    write_page(result, folder / "report.html")
    return [folder / name for name in ("compare.json", "compare.md", "compare.png", "report.html")]
