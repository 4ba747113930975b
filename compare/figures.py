"""compare.png: curves, gap, times and verdicts of a comparison in one picture, drawn from compare.json alone."""

import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compare.report import verdict_sentence

WIDTH, DPI = 8.3, 200
"""Inches, and pixels an inch: a README is 830 px wide, so that there 8 points are 11 px."""
PANEL = 2.4
"""Inches that a panel is high."""
# Okabe & Ito 2008, black made lighter and yellow darker so that they show on white and on black
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#5A5A5A", "#A89F00")
DASHES = ("-", (0, (5, 1.5)), (0, (6, 1.5, 1.5, 1.5)), (0, (1.5, 1)), (0, (9, 2)), (0, (4, 1, 1, 1, 1, 1)), "-.", ":")
GREY = "#C4C4C4"
BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1}
MOST_SENTENCES = 3
STYLE = {
    "font.size": 8.5, "axes.titlesize": 9, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 5,
    "axes.labelsize": 8.5, "xtick.labelsize": 8.5, "ytick.labelsize": 8.5, "axes.linewidth": 0.6,
    "legend.fontsize": 8.5, "legend.frameon": False, "legend.handlelength": 3.2, "legend.columnspacing": 1.6,
    "axes.spines.top": False, "axes.spines.right": False, "axes.formatter.useoffset": False, "text.parse_math": False,
}  # fmt: skip


@dataclass
class Look:
    """How a variant is drawn. The first eight have a letter; the rest are thin, grey and nameless."""

    letter: str
    color: str
    dash: str | tuple
    width: float = 1.6


def looks(result: dict) -> list[Look]:
    named = [Look(*look) for look in zip("ABCDEFGH", PALETTE, DASHES, strict=True)]
    return (named + [Look("", GREY, "-", 0.7)] * len(result["variants"]))[: len(result["variants"])]


def draw(result: dict, path: Path) -> None:
    """Writes the picture of `result`, compare.json's contents: a PNG 1660 px wide; equal results give equal bytes."""
    with in_style():
        figure_of(result).savefig(path, format="png", dpi=DPI, metadata={"Software": "normgpt"})


def in_style():
    """A context in which matplotlib draws in our style, whatever the user's own is."""
    from matplotlib import style

    return style.context(["default", STYLE])


def figure_of(result: dict):
    """The matplotlib Figure, to be made and saved in_style(): a legend, four panels, the verdicts beneath."""
    from matplotlib.figure import Figure

    styles = looks(result)
    words = caption(result, styles)
    legend_rows, columns = legend_shape(result)
    bottom, top = 0.17 * words.count("\n") + 0.78, 0.2 * legend_rows + 0.42
    height = bottom + 2 * PANEL + 0.72 + top
    figure = Figure(figsize=(WIDTH, height), dpi=DPI)

    def panel(left: float, floor: float, width: float):
        return figure.add_axes((left / WIDTH, floor / height, width / WIDTH, PANEL / height))

    draw_losses(panel(0.62, bottom + PANEL + 0.72, 3.33), result, styles)
    draw_gaps(panel(4.72, bottom + PANEL + 0.72, 2.88), result, styles)
    draw_seconds(panel(0.62, bottom, 3.33), result, styles)
    draw_times(panel(4.72, bottom, 2.88), result, styles)
    legend(figure, result, styles, columns)
    figure.text(0.08 / WIDTH, 0.08 / height, words, va="bottom", linespacing=1.3)
    return figure


# around the panels


def minus(c: dict, result: dict, styles: list[Look]) -> str:
    """B − A, or nothing for variants without a letter."""
    letters = {v["label"]: look.letter for v, look in zip(result["variants"], styles, strict=True)}
    both = letters[c["candidate"]], letters[c["baseline"]]
    return " − ".join(both) if all(both) else ""


def caption(result: dict, styles: list[Look]) -> str:
    """The verdict sentences, as many as fit."""
    lines = []
    for c in result["comparisons"][:MOST_SENTENCES]:
        letters, names = minus(c, result, styles), f"{c['candidate']} against {c['baseline']}, {c['pairing']}"
        who = ", ".join([letters, names] if letters and len(names) < 100 else [letters or short(names)])
        lines.append(f"{who}: {verdict_sentence(c, result['unit'])}")
    more = len(result["comparisons"]) - MOST_SENTENCES
    lines += [f"and {more} more"] if more > 0 else []
    lines = [line.replace(" %", "\N{NO-BREAK SPACE}%") for line in lines]
    return "\n".join(textwrap.fill(line, 124, subsequent_indent="    ") for line in lines)


def short(label: str, most: int = 84) -> str:
    """The label, its middle left out where it is too long."""
    return label if len(label) <= most else f"{label[: most * 2 // 3].strip()} … {label[-most // 3 + 3 :].strip()}"


def legend_shape(result: dict) -> tuple[int, int]:
    """Rows and columns: as many beside each other as the longest label allows."""
    named = result["variants"][: len(PALETTE)]
    entries = len(named) + (len(result["variants"]) > len(named))
    columns = max(1, min(4, entries, 112 // (20 + max(len(short(v["label"])) for v in named))))
    rows = -(-entries // columns)
    return rows, -(-entries // rows)


def legend(figure, result: dict, styles: list[Look], columns: int) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for variant, look in zip(result["variants"][: len(PALETTE)], styles, strict=False):
        seeds = f" ({len(variant['runs'])} runs)" if len(variant["runs"]) > 1 else ""
        label = f"{look.letter}  {short(variant['label'])}{seeds}"
        handles.append(Line2D([], [], color=look.color, linestyle=look.dash, linewidth=look.width, label=label))
    if len(result["variants"]) > len(handles):
        more = f"and {len(result['variants']) - len(handles)} more"
        handles.append(Line2D([], [], color=GREY, linewidth=1, label=more))
    figure.legend(handles=handles, loc="upper left", ncols=columns, borderaxespad=0.2)


def explain(ax, why: str) -> None:
    """Says in place of a panel's curves why there are none."""
    ax.set(xticks=[], yticks=[])
    ax.text(0.5, 0.5, textwrap.fill(why, 40), ha="center", va="center", transform=ax.transAxes, color="#555555")


def label_axes(ax, label: str, unit: str | None = None) -> None:
    """Names both axes; a handful of round numbers on each, in full."""
    from matplotlib.ticker import MaxNLocator

    if unit:
        ax.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        ax.set_ylabel(unit)
    ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.10g}")
    ax.set_xlabel(label)


# curves


def finite(run: dict, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    """A curve of compare.json without its gaps, each (n,)."""
    xs, ys = np.array(run[x], dtype=float), np.array(run[y], dtype=float)
    both = np.isfinite(xs) & np.isfinite(ys)
    return xs[both], ys[both]


def draw_line(ax, x: np.ndarray, y: np.ndarray, look: Look) -> None:
    """A variant's line, with its points where they are too few to see it by."""
    form = {"linestyle": look.dash, "linewidth": look.width, "marker": "o" if len(x) < 4 else None}
    ax.plot(x, y, color=look.color, zorder=4 if look.letter else 1, **form)


def over_seeds(runs: list[dict], x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    """(n,) and (runs, n): `y` of each run at each `x` of the shortest one, on straight lines between its own points."""
    curves = [curve for curve in (finite(run, x, y) for run in runs) if len(curve[0])]
    if not curves:
        return np.zeros(0), np.zeros((0, 0))
    grid = min((xs for xs, _ in curves), key=lambda xs: xs[-1])
    return grid, np.array([np.interp(grid, *curve) for curve in curves])


def split(variant: dict) -> tuple[list[dict], list[tuple[dict, int]]]:
    """The curves of its runs that kept finite; of the others the curves and the step at which they diverged."""
    both = list(zip(variant["series"]["runs"], [run["diverged_at"] for run in variant["runs"]], strict=True))
    return [curve for curve, at in both if at is None], [(curve, at) for curve, at in both if at is not None]


def draw_losses(ax, result: dict, styles: list[Look]) -> None:
    ax.set_title("Loss: validation (strong), training (faint)")
    shown, ends = [], []
    for variant, look in zip(result["variants"], styles, strict=True):
        whole, diverged = split(variant)
        front = {"color": look.color, "zorder": 3 if look.letter else 1}
        x, rows = over_seeds(whole, "step", "train")
        if len(x) and look.letter:
            ax.plot(x, rows.mean(axis=0), linewidth=0.6, alpha=0.45, **front)
            shown.append((x, rows.mean(axis=0)))
        x, rows = over_seeds(whole, "val_step", "val")
        if len(x):
            draw_line(ax, x, rows.mean(axis=0), look)
            shown.append((x, rows.mean(axis=0)))
        if len(rows) > 1:
            ax.fill_between(x, rows.min(axis=0), rows.max(axis=0), alpha=0.2, linewidth=0, **front)
        for curve, at in diverged:
            x, loss = finite(curve, "step", "train")
            ax.plot(x, loss, linewidth=0.9, **front)
            ends.append((x, loss, look, f"{look.letter or short(variant['label'], 16)} diverged at step {at:,}"))
    curves = shown or [(x, np.minimum(loss, loss[0])) for x, loss, *_ in ends if len(x)]
    if not curves:
        return explain(ax, ", ".join(text for *_, text in ends[:3]) or "no loss was recorded")
    low, high = readable(curves)
    ax.set_ylim(low, high + 0.09 * min(len(ends), 4) * (high - low))
    mark_divergence(ax, ends, low, high)
    label_axes(ax, "step", result["unit"])


def readable(curves: list[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float]:
    """y-limits that hold the last three quarters of the curves."""
    start = max(x[-1] for x, _ in curves) / 4
    late = [y[x >= start] if (x >= start).sum() > 2 else y for x, y in curves]
    low, high = min(y.min() for y in late), max(y.max() for y in late)
    room = max(high - low, 1e-3 * abs(high), 1e-6)
    return low - 0.06 * room, high + 0.06 * room


def mark_divergence(ax, ends: list, low: float, high: float) -> None:
    """A cross where each diverged run ends, or at the nearer of `low` and `high`, and words above."""
    for x, loss, look, _ in ends:
        if len(x):
            top = high if x[-1] > np.mean(ax.get_xlim()) else ax.get_ylim()[1]  # the words are on the right
            ax.plot(x[-1], np.clip(loss[-1], low, top), "x", color=look.color, markersize=7, clip_on=False, zorder=6)
    words = "\n".join(f"× {text}" for *_, text in ends[: 4 if len(ends) == 4 else 3])
    words += f"\nand {len(ends) - 3} more" if len(ends) > 4 else ""
    ax.text(0.99, 0.985, words, ha="right", va="top", transform=ax.transAxes, zorder=7, bbox=BOX)


def draw_gaps(ax, result: dict, styles: list[Look]) -> None:
    ax.set_title("Gap in training loss")
    there = [c for c in result["comparisons"] if c["gap"]]
    if not there:
        whys = dict.fromkeys(c["why_no_gap"] for c in result["comparisons"])
        return explain(ax, f"no gap: {'; '.join(whys)}" if whys else "nothing was compared")
    colors = {v["label"]: look.color for v, look in zip(result["variants"], styles, strict=True)}
    named = [c for c in there if minus(c, result, styles)][: len(PALETTE)]
    tolerance = there[0]["tolerance"]
    reach = [-1.25 * tolerance, 1.25 * tolerance]
    for c in there:
        x, d = finite(c["series"], "step", "gap")
        reach += [*d[len(d) // 4 :], *(c["gap"]["interval"] or [])]
        if not any(c is other for other in named):
            ax.plot(x, d, color=GREY, linewidth=0.5, alpha=0.3, zorder=1)
    for n, c in enumerate(named):
        draw_gap(ax, c, colors[c["candidate"]], n, len(named))
    ax.axhline(0, color="black", linewidth=0.6)
    for y in (-tolerance, tolerance):
        ax.axhline(y, color="#555555", linewidth=0.7, linestyle=(0, (2, 2)))
    room, few = 0.05 * (max(reach) - min(reach)), any(c["gap"]["interval"] is None for c in named)
    ax.set_ylim(min(reach) - room * (1 + 2 * few), max(reach) + room)
    more = f"; {len(there) - len(named)} more in grey" if len(there) > len(named) else ""
    label_axes(ax, f"step (dotted: tolerance ±{tolerance:.3g}{more})", result["unit"])
    label_right(ax, [(c["gap"]["gap"], minus(c, result, styles), colors[c["candidate"]]) for c in named])
    if few:
        ax.text(0.99, 0.02, "too few steps for an interval", ha="right", transform=ax.transAxes, zorder=7, bbox=BOX)


def draw_gap(ax, c: dict, color: str, n: int, count: int) -> None:
    """One comparison's gap per step, faint, and its mean over the last half with the interval.

    A single one has its band over seeds and its interval as areas; the intervals of several stand side by side as bars.
    """
    x, d = finite(c["series"], "step", "gap")
    ax.plot(x, d, color=color, linewidth=0.6, alpha=0.7 if count == 1 else 0.4, zorder=2)
    start, end, mean, interval = c["half_from"], c["steps"][1], c["gap"]["gap"], c["gap"]["interval"]
    ax.plot([start, end], [mean, mean], color=color, linewidth=2.2, solid_capstyle="butt", zorder=5)
    if count == 1 and "half" in c["series"]:
        half = np.interp(x, *finite(c["series"], "step", "half"))
        ax.fill_between(x, d - half, d + half, color=color, alpha=0.13, linewidth=0, zorder=1)
    if interval and count == 1:
        ax.fill_between([start, end], *interval, color=color, alpha=0.3, linewidth=0.8, zorder=3)
    elif interval:
        at = start + (n + 0.5) / count * (end - start)
        ax.plot([at, at], interval, color=color, linewidth=1.6, marker="_", markersize=6, zorder=6)


def label_right(ax, labels: list[tuple[float, str, str]]) -> None:
    """Words beside the panel at heights (in data units) that are moved apart where they would overlap."""
    low, high = ax.get_ylim()
    step, taken = 0.075, -1.0
    places = sorted(((y - low) / (high - low), text, color) for y, text, color in labels)
    for n, (y, text, color) in enumerate(places):
        room = 1 - step * (len(places) - 1 - n)  # what those above need
        taken = max(min(max(y, 0.0), room), taken + step)
        ax.text(1.015, taken, text, color=color, va="center", transform=ax.transAxes, weight="bold")


# times


def draw_seconds(ax, result: dict, styles: list[Look]) -> None:
    ax.set_title("Validation loss against time")
    curves = []
    for variant, look in zip(result["variants"], styles, strict=True):
        whole, _ = split(variant)
        x, loss = over_seeds(whole, "val_step", "val")
        at, seconds = over_seeds(whole, "val_step", "val_seconds")
        if not len(x) or not len(at):
            continue
        seconds, loss = np.interp(x, at, seconds.mean(axis=0)), loss.mean(axis=0)
        draw_line(ax, seconds, loss, look)
        curves.append((seconds, loss))
    if not curves:
        whole = any(run["diverged_at"] is None for v in result["variants"] for run in v["runs"])
        return explain(ax, "no evaluation after steps that were timed" if whole else "every run diverged")
    ax.set_ylim(*readable(curves))
    differ = " (not comparable)" if why_times_differ(result) else ""
    label_axes(ax, f"seconds of training steps{differ}", result["unit"])


def why_times_differ(result: dict) -> str:
    """What keeps step times from being compared, in words; nothing where they can be."""
    times = [c["step_time_ratio"] for c in result["comparisons"]]
    return "; ".join(dict.fromkeys(t["why"] for t in times if "why" in t))


def digits(ms: float) -> int:
    """Decimals that leave three or four figures."""
    return 0 if ms >= 1000 else 1 if ms >= 10 else 2


def draw_times(ax, result: dict, styles: list[Look]) -> None:
    """A violin a named variant, between the 2nd and the 98th percentile, and a row of medians for the rest."""
    why = why_times_differ(result)
    ax.set_title("Step time, with median")
    times = [np.array(v["series"]["step_ms_quantiles"], dtype=float)[2:-2] for v in result["variants"]]
    if not any(map(len, times)):
        return explain(ax, "n/a: no step was timed")
    named = list(zip(times[: len(PALETTE)], styles, strict=False))
    for row, (ms, look) in enumerate(named):
        words = "n/a"
        if len(ms):
            violin = ax.violinplot([ms], [row], orientation="horizontal", widths=0.8, showextrema=False)
            violin["bodies"][0].set(facecolor=look.color, alpha=0.45)
            ax.plot([np.median(ms)] * 2, [row - 0.32, row + 0.32], color=look.color, linewidth=2)
            words = f"{np.median(ms):,.{digits(np.median(ms))}f} ms"
        ax.text(1.015, row, words, va="center", transform=ax.get_yaxis_transform())
    letters = [look.letter for _, look in named]
    rest = [np.median(ms) for ms in times[len(named) :] if len(ms)]
    if len(times) > len(named):
        ax.plot(rest, [len(named)] * len(rest), "|", color="#888888", markersize=9, alpha=0.6)
        letters.append("rest")
    ax.set_yticks(range(len(letters)), letters)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(letters) - 0.4, -0.6)
    label_axes(ax, textwrap.shorten(f"ms (not comparable: {why})" if why else "ms", 52, placeholder=" ..."))
