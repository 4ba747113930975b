"""report.html: one file that holds a comparison whole, with curves to zoom into, and asks no network for anything."""

import json
from html import escape
from pathlib import Path
from string import Template

import numpy as np

from compare import report
from compare.figures import PALETTE, finite, readable, short, why_times_differ
from records import flat

MOST_RUNS = 60
"""Runs whose curves are in the page: with more a browser answers slowly. The tables hold them all."""
VISIBLE = 8
"""Variants, or comparisons, that are drawn at first; a click in the legend shows the others."""
MOST_HOVERED = 12
"""Curves that are described together where the pointer is; of more only the nearest."""
DASHES = ("solid", "dash", "dashdot", "dot", "longdash", "longdashdot")
DEFINITIONS = {
    "loss": "mean cross-entropy of the next token in nats per token, or in bits per byte where tokenizers differ",
    "validation loss": "the loss on a fixed set of tokens; ± is the standard deviation over seeds",
    "gap": "training loss of the candidate minus that of the baseline at the same step, mean over the last half of "
    "the steps after warm-up; its 95 % interval is over seeds, or with one seed over steps: then about this pair alone",
    "gap_abs": "mean size of that difference over all steps after warm-up",
    "overlap": "share of the evaluations after warm-up at which the noise of the seeds could explain the difference "
    "(95 %); with one seed the share of steps within the tolerance",
    "verdict": "equivalent where the 90 % interval of the difference in final validation loss over seeds lies inside "
    "the margin, different where it lies outside, else not enough seeds",
    "step time": "forward, backward, clipping and optimiser, in ms; no data, evaluation, logging or warm-up steps",
    "step time ratio": "the candidate's step time over the baseline's, with a 95 % interval",
    "to equal loss": "steps, or seconds of training steps, that the candidate takes to the higher of both final "
    "validation losses, over what the baseline takes: under 1 is sooner",
    "seconds": "sum of the step times; steps that warm up count as the median step",
}
PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --line: #8885; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e4e4; --paper: #16181b; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 72rem; margin: 0 auto; padding: 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.wide { overflow: auto; max-height: 80vh; } pre { overflow-x: auto; font-size: .8rem; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
td:first-child { min-width: 9rem; }
th, td { padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line);
  text-align: left; vertical-align: top; }
.plot { width: 100%; height: 26rem; } dt { font-weight: 600; } dd { margin: 0 0 .4rem; }
summary { cursor: pointer; }
</style>
</head>
<body>
<h1>$title</h1>
$body
<script>$plotly</script>
<script>
const ink = getComputedStyle(document.body).color;
for (const [id, figure] of Object.entries($figures)) {
  figure.layout.font = {color: ink, family: "system-ui, sans-serif"};
  document.getElementById(id).className = "plot";
  Plotly.newPlot(id, figure.data, figure.layout, {displaylogo: false, responsive: true});
}
document.getElementById("unscripted").remove();
</script>
</body>
</html>
""")


def write_page(result: dict, path: Path) -> None:
    """Writes the page of `result`, compare.json's contents."""
    from plotly.offline import get_plotlyjs

    plots = {"losses": losses(result), "gaps": gaps(result), "seconds": seconds(result), "times": times(result)}
    figures = {name: plot for name, plot in plots.items() if plot["data"]}
    script = json.dumps(figures, separators=(",", ":")).replace("<", "\\u003c")  # no label ends the script
    body = "\n".join([*words(result), *curves(result, plots), *origins(result)])
    text = PAGE.substitute(title=escape(title(result)), body=body, plotly=get_plotlyjs(), figures=script)
    path.write_text(text, encoding="utf-8", errors="replace")


# text


def title(result: dict) -> str:
    c = result["comparisons"]
    return f"{c[0]['candidate']} against {c[0]['baseline']}" if len(c) == 1 else f"{len(result['variants'])} variants"


def words(result: dict) -> list[str]:
    """The verdicts, the notes and the tables."""
    verdicts = [
        f"<li><b>{escape(c['candidate'])} against {escape(c['baseline'])}, {escape(c['pairing'])}.</b> "
        f"{escape(report.verdict_sentence(c, result['unit']))}"
        + details("All figures", f"<pre>{escape(chr(10).join(report.sentences(c, result['unit'])))}</pre>")
        + "</li>"
        for c in result["comparisons"]
    ]
    parts = [f"<ul>{''.join(verdicts[:VISIBLE])}</ul>"]
    if verdicts[VISIBLE:]:
        parts.append(details(f"{len(verdicts) - VISIBLE} more", f"<ul>{''.join(verdicts[VISIBLE:])}</ul>"))
    if result["notes"]:
        parts.append(f"<h2>Notes</h2><ul>{''.join(f'<li>{escape(note)}</li>' for note in result['notes'])}</ul>")
    tables = table(*report.variant_rows(result)), table(*report.comparison_rows(result))
    return [*parts, "<h2>Runs</h2>", tables[0], "<h2>Comparisons</h2>", tables[1]]


def table(header: list[str], body: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(str(cell))}</th>" for cell in header)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in body)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def details(summary: str, inner: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{inner}</details>"


def curves(result: dict, plots: dict) -> list[str]:
    """Headings and places of the plots; words where there is nothing to plot."""
    whys = dict.fromkeys(c["why_no_gap"] for c in result["comparisons"] if not c["gap"])
    apart = why_times_differ(result)
    beside = {"gaps": f"No gap: {'; '.join(whys)}." if whys else ""}
    beside |= dict.fromkeys(("seconds", "times"), f"Not comparable: {apart}." if apart else "")
    headings = {
        "losses": f"Loss ({result['unit']}): validation, and training faint",
        "gaps": f"Gap in training loss ({result['unit']}), candidate minus baseline",
        "seconds": f"Validation loss ({result['unit']}) against seconds of training steps",
        "times": "Step time (ms)",
    }
    count = len(shown(result))
    parts = ['<p id="unscripted">The curves need JavaScript; compare.png shows them without.</p>']
    if count < len(result["variants"]):
        parts.append(f"<p>The curves are those of the first {count} of {len(result['variants'])} variants.</p>")
    for name, heading in headings.items():
        parts.append(f"<h2>{heading}</h2>" + (f"<p>{escape(beside[name])}</p>" if beside.get(name) else ""))
        parts.append(f'<div id="{name}"></div>' if plots[name]["data"] else "<p>Nothing to draw.</p>")
    return parts


def origins(result: dict) -> list[str]:
    """What differs, whole configurations, the environment, definitions."""
    import yaml

    variants = {variant["label"]: variant["config"] for variant in result["variants"]}
    rows = [[label, *values] for label, *values in zip(variants, *result["differs"].values(), strict=True)]
    parts = ["<h2>What differs</h2>", table(["", *result["differs"]], rows)]
    parts += [
        details(f"Configuration of {label}", f"<pre>{escape(yaml.safe_dump(config, sort_keys=False))}</pre>")
        for label, config in variants.items()
    ]
    made_on = {"command": result["command"]} | flat(result["environment"])
    parts.append(details("Environment", table(["", ""], [[key, value] for key, value in made_on.items()])))
    terms = "".join(f"<dt>{term}</dt><dd>{escape(meaning)}</dd>" for term, meaning in DEFINITIONS.items())
    return [*parts, details("How the numbers are defined", f"<dl>{terms}</dl>")]


# plots, as Plotly's plain values


def shown(result: dict) -> list[dict]:
    """The first variants, as many as have at most MOST_RUNS runs together, and one in any case."""
    total, taken = 0, []
    for variant in result["variants"]:
        total += len(variant["runs"])
        if taken and total > MOST_RUNS:
            break
        taken.append(variant)
    return taken


def plot(data: list[dict], x: str, **layout) -> dict:
    """Traces with the layout that all plots have."""
    axis = {"gridcolor": "rgba(128,128,128,0.25)", "zerolinecolor": "rgba(128,128,128,0.5)", "automargin": True}
    drawn = sum(trace["visible"] is True and trace.get("hoverinfo") != "skip" for trace in data)
    common = {
        "xaxis": axis | {"title": {"text": x}},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "x unified" if drawn <= MOST_HOVERED else "closest",
        "hoverdistance": -1,
        "hoverlabel": {"namelength": -1},
        "margin": {"t": 8, "r": 8, "l": 48, "b": 48},
        "legend": {"orientation": "h", "y": 1.01, "yanchor": "bottom", "maxheight": 0.25},
    }
    return {"data": data, "layout": common | layout | {"yaxis": axis | layout.get("yaxis", {})}}


def seen(n: int) -> bool | str:
    return True if n < VISIBLE else "legendonly"


def plain(text: str) -> str:
    """Text that Plotly shows as it stands: it reads tags, and formulas between dollar signs."""
    return escape(text, quote=False).replace("$", "&#36;")


def trace(x: list, y: list, *, n: int, group: str, **more) -> dict:
    """A line of the n-th variant or comparison, `group`; a click on that group's entry in the legend hides it."""
    line = {"color": PALETTE[n % len(PALETTE)], "dash": DASHES[n % len(DASHES)]} | more.pop("line", {})
    form = {"type": "scatter", "mode": "lines", "line": line, "visible": seen(n), "showlegend": False}
    return form | {"x": x, "y": y, "name": plain(group), "legendgroup": group} | more


def run_traces(result: dict, x: str, y: str, what: str, **more) -> list[dict]:
    """A line a run that has one."""
    traces = []
    for n, variant in enumerate(shown(result)):
        for run, series in zip(variant["runs"], variant["series"]["runs"], strict=True):
            xs, ys = (values.tolist() for values in finite(series, x, y))
            ended = f", diverged at step {run['diverged_at']}" if run["diverged_at"] is not None else ""
            hover = f"%{{y:.4f}}<extra>{plain(run['name'])}, {what}{ended}</extra>"
            look = {"n": n, "group": variant["label"], "hovertemplate": hover, "meta": run["diverged_at"]}
            traces.append(trace(xs, ys, **look, **more))
    return [trace for trace in traces if trace["x"]]


def with_legend(traces: list[dict]) -> list[dict]:
    """The first trace of each group makes its entry in the legend."""
    first = {trace["legendgroup"]: trace for trace in reversed(traces)}
    return [trace | {"showlegend": trace is first[trace["legendgroup"]]} for trace in traces]


def y_range(traces: list[dict]) -> dict:
    """The range to begin with: that of the runs that did not diverge."""
    curves = [(np.array(trace["x"]), np.array(trace["y"])) for trace in traces if trace["meta"] is None]
    return {"range": list(readable(curves))} if curves else {}


def losses(result: dict) -> dict:
    strong = run_traces(result, "val_step", "val", "validation", mode="lines+markers", marker={"size": 4})
    faint = run_traces(result, "step", "train", "training", opacity=0.35, line={"width": 1, "dash": "solid"})
    return plot(with_legend(strong + faint), "step", yaxis=y_range(strong + faint))


def seconds(result: dict) -> dict:
    data = run_traces(result, "val_seconds", "val", "validation", mode="lines+markers", marker={"size": 4})
    return plot(with_legend(data), "seconds", yaxis=y_range(data))


def gaps(result: dict) -> dict:
    """The difference per step with its band over seeds, and the mean over the last half with its interval."""
    place = {variant["label"]: n for n, variant in enumerate(shown(result))}
    compared = [c for c in result["comparisons"] if c["gap"] and {c["baseline"], c["candidate"]} <= place.keys()]
    data = []
    for c in compared:
        look = {"n": place[c["candidate"]], "group": f"{short(c['candidate'], 56)} − {short(c['baseline'], 56)}"}
        x, d = finite(c["series"], "step", "gap")
        data.append(trace(x.tolist(), d.tolist(), line={"width": 1, "dash": "solid"}, **look))
        if "half" in c["series"] and len(compared) < 4:
            half = np.interp(x, *finite(c["series"], "step", "half"))
            data.append(area(x.tolist(), (d - half).tolist(), (d + half).tolist(), "1A", **look))
        ends, mean = [c["half_from"], c["steps"][1]], c["gap"]["gap"]
        data.append(trace(ends, [mean, mean], line={"width": 4, "dash": "solid"}, hoverinfo="skip", **look))
        if c["gap"]["interval"]:
            low, high = c["gap"]["interval"]
            data.append(area(ends, [low, low], [high, high], "40", **look))
    tolerance = compared[0]["tolerance"] if compared else 0
    lines = [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y,
              "line": {"width": 1, "dash": "dot" if y else "solid", "color": "#888888"}}
             for y in (-tolerance, 0, tolerance)]  # fmt: skip
    label = f"step; dotted: the tolerance, ±{tolerance:.3g}"
    reach = [-1.25 * tolerance, 1.25 * tolerance, *(y for c in compared for y in c["gap"]["interval"] or [])]
    reach += [y for c in compared for y in finite(c["series"], "step", "gap")[1].tolist()]
    room = 0.05 * (max(reach) - min(reach))
    return plot(
        with_legend(data),
        label,
        shapes=lines,
        yaxis={"hoverformat": "+.4f", "range": [min(reach) - room, max(reach) + room]},
    )


def area(x: list, low: list, high: list, alpha: str, *, n: int, group: str) -> dict:
    """What lies between two curves."""
    fill = {"fill": "toself", "fillcolor": PALETTE[n % len(PALETTE)] + alpha, "hoverinfo": "skip", "line": {"width": 0}}
    return trace(x + x[::-1], low + high[::-1], n=n, group=group, **fill)


def times(result: dict) -> dict:
    """A violin a variant, of the quantiles of all its steps but the slowest and fastest in two hundred."""
    form = {"type": "violin", "orientation": "h", "points": False, "box": {"visible": True}, "spanmode": "hard"}
    data = []
    for n, variant in enumerate(shown(result)):
        look = {"name": plain(variant["label"]), "line": {"color": PALETTE[n % len(PALETTE)]}, "visible": seen(n)}
        if variant["series"]["step_ms_quantiles"]:
            data.append(form | look | {"x": variant["series"]["step_ms_quantiles"]})
    return plot(data, "ms", hovermode="closest", yaxis={"showticklabels": False, "autorange": "reversed"})
