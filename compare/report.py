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


def _interval(interval: list[float] | None, form: str = "+.4f", level: int = 95) -> str:
    return f"{level} % {interval[0]:{form}} to {interval[1]:{form}}" if interval else ""


# one run

ROWS = {
    "train loss (nats/token)": lambda s: _number(s["train/loss"], 4),
    "validation loss (nats/token)": lambda s: _number(s["val/loss"], 4),
    "bits per byte": lambda s: _number(s["val/bpb"], 4),
    "step, median ms": lambda s: _number(s["time/step_ms"], 1),
    "step, p10 to p90 ms": lambda s: f"{_number(s['time/step_ms_p10'], 1)} to {_number(s['time/step_ms_p90'], 1)}",
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
    return [
        f"{c['candidate']} minus {c['baseline']}, {c['pairing']}:",
        *(f"  {line}" for line in c["diverged"]),
        *(f"  {line}" for line in _loss_lines(c, unit)),
        f"  {_time_line(c['step_time_ratio'])}",
        f"  {verdict_sentence(c, unit)}",
    ]


def _loss_lines(c: dict, unit: str) -> list[str]:
    lines = []
    if c["gap"] is None:
        lines.append(f"gap              {c['why_no_gap']}")
    else:
        gap = c["gap"]
        interval = _interval(gap["interval"]) or "too few steps for an interval"
        over = f"over {c['n_seeds'][0]} seeds, " if gap["over"] == "seeds" else ""
        lines += [
            f"gap              {gap['gap']:+.4f} {unit} ({interval}), {over}mean over the last half",
            f"gap_abs          {gap['gap_abs']:.4f} {unit}, mean over {gap['n_steps']} steps after warm-up",
        ]
        if "overlap" not in c:
            within = f"within {c['tolerance']:g} {unit}; no seed noise measured"
            lines.append(f"overlap          {gap['overlap']:.1%} of these steps {within}")
    if "overlap" in c:
        paired = f", {c['overlap_paired']:.1%} within that of the pairs" if "overlap_paired" in c else ""
        lines.append(f"overlap          {c['overlap']:.1%} of the evaluations within the noise of the seeds{paired}")
    reach = c.get("to_loss") or {}
    shares = [f"{reach[key]:.3f} of the {key}" for key in ("steps", "seconds") if reach.get(key)]
    if shares:
        lines.append(f"to equal loss    {' and '.join(shares)}, both down to {reach['loss']:.4f} {unit}")
    return lines


def _time_line(times: dict) -> str:
    if times["ratio"] is None:
        return f"step time ratio  not measured: {times['why']}"
    many = {"interleaved": "pairs of runs", "separate runs": "seeds"}[times["how"]]
    over = f", over {times['n']} {many}" if times["n"] > 1 else ""
    interval = f" ({_interval(times['interval'], '.3f')})" if times["interval"] else ""
    how = {"interleaved": "steps interleaved", "separate runs": "separate runs, so the machine's drift is in it"}
    return f"step time ratio  {times['ratio']:.3f}{interval}{over}, {how[times['how']]}"


def verdict_sentence(comparison: dict, unit: str) -> str:
    """The comparison in one sentence."""
    c = comparison
    if c["diverged"]:
        return f"No verdict: {'; '.join(c['diverged'])}."
    final = c["final"]
    if final is None:
        return f"No verdict: {c['why_no_final']}."
    where = (
        f"validation loss at step {final['step']}, the last that all have,"
        if final.get("common")
        else "final validation loss"
    )
    apart = f"the {where} differs by {final['difference']:+.4f} {unit}"
    if "interval" not in final:
        if c["noise"]:
            return f"This is noise: {apart}, and no setting does."
        return f"No verdict from one seed: {apart}, but one seed cannot tell {c['candidate']} from {c['baseline']}."
    n = c["n_seeds"][0] if c["n_seeds"][0] == c["n_seeds"][1] else " and ".join(map(str, c["n_seeds"]))
    apart = f"over {n} seeds {apart} ({_interval(final['interval'], level=90)})"
    margin = f"±{c['margin']:g} {unit}"
    if c["verdict"] == EQUIVALENT:
        return f"Equivalent: {apart}, inside {margin}."
    if c["verdict"] == DIFFERENT:
        return f"Different: {apart}, outside {margin}."
    more = f"about {c['more_seeds']} more" if c["more_seeds"] else f"more than {MOST_SEEDS} seeds"
    return f"Not enough seeds: {apart}, neither inside nor outside {margin}; {more} would settle it (power {POWER})."


# all of them


def variant_rows(result: dict) -> tuple[list[str], list[list[str]]]:
    """Header and one row a variant: mean ± standard deviation over its seeds."""
    header = ["", "seeds", f"validation loss ({result['unit']})", "bits per byte", "step ms", "ended"]
    loss = "val/bpb" if result["unit"] == "bits/byte" else "val/loss"
    body = []
    for variant in result["variants"]:
        runs = variant["runs"]
        ends = [f"diverged at step {r['diverged_at']}" if r["diverged_at"] is not None else r["status"] for r in runs]
        cells = [_spread(runs, loss), _spread(runs, "val/bpb"), _spread(runs, "time/step_ms", 1)]
        body.append([variant["label"], str(len(runs)), *cells, ", ".join(dict.fromkeys(ends))])
    return header, body


def comparison_rows(result: dict) -> tuple[list[str], list[list[str]]]:
    """Header and one row a comparison."""
    unit = result["unit"]
    header = ["candidate minus baseline", f"gap ({unit})", f"validation loss ({unit})", "verdict", "step time ratio"]
    body = []
    for c in result["comparisons"]:
        gap, final, times = c["gap"], c["final"], c["step_time_ratio"]
        body.append(
            [
                f"{c['candidate']} minus {c['baseline']}",
                _with(f"{gap['gap']:+.4f}", _interval(gap["interval"])) if gap else "n/a",
                _with(f"{final['difference']:+.4f}", _interval(final.get("interval"), level=90)) if final else "n/a",
                _short_verdict(c),
                _with(f"{times['ratio']:.3f}", _interval(times["interval"], ".3f")) if times["ratio"] else "n/a",
            ]
        )
    return header, body


def _with(value: str, interval: str) -> str:
    return f"{value} ({interval})" if interval else value


def _short_verdict(c: dict) -> str:
    if c["diverged"]:
        return "diverged"
    if c["final"] is None or "interval" not in c["final"]:
        return "noise" if c["noise"] else "one seed" if c["final"] else "n/a"
    return c["verdict"] + (f", {c['more_seeds']} more" if c["more_seeds"] else "")


def _spread(runs: list[dict], key: str, digits: int = 4) -> str:
    values = [run[key] for run in runs if run[key] is not None and run["diverged_at"] is None]
    if not values:
        return "n/a"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def _table(header: list[str], body: list[list[str]]) -> Table:
    table = Table(*header)
    for cells in body:
        table.add_row(*cells)
    return table


def markdown(result: dict) -> str:
    """Tables and verdicts for a README."""
    lines = []
    for header, body in (variant_rows(result), comparison_rows(result)):
        lines += ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *body)] + [""]
    words = [
        f"{c['candidate']} against {c['baseline']}: {verdict_sentence(c, result['unit'])}"
        for c in result["comparisons"]
    ]
    return "\n".join(lines + [f"- {line}" for line in words + result["notes"]]) + "\n"


def shown(result: dict) -> Group:
    """Tables and sentences for a terminal: a column a run for one pair, else a row a variant."""
    if sum(len(v["runs"]) for v in result["variants"]) == 2:
        tables = [summary_table([v["runs"][0] | {"label": v["label"]} for v in result["variants"]])]
    else:
        tables = [_table(*variant_rows(result)), _table(*comparison_rows(result))]
    words = [line for c in result["comparisons"] for line in sentences(c, result["unit"])]
    return Group(*tables, *(Text(line) for line in words), *(Text(f"Note: {note}") for note in result["notes"]))


def console() -> Console:
    return Console(soft_wrap=True, highlight=False)


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
