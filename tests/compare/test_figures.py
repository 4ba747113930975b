"""compare.png from compare.json: whatever is missing, it is drawn, legible, and the same bytes each time."""

import copy
import json
from itertools import combinations

import numpy as np
import pytest

from compare.comparison import compare
from compare.figures import draw, figure_of, in_style, over_seeds
from records import load_run
from tests.compare.fake_runs import ENVIRONMENT, config, curve, write_run, write_sweep

pytest.importorskip("matplotlib")

README_WIDTH = 830  # px at which GitHub shows it
STEPS = 700


def blown_up(*, at: int) -> np.ndarray:
    """A loss that grows from step at - 50 on and is not finite at step `at`."""
    loss = curve(STEPS)[:at]
    loss[-50:] *= np.exp(np.arange(50) / 10)
    loss[-1] = np.nan
    return loss


def compared(folders: list) -> dict:
    return json.loads(json.dumps(compare([load_run(folder) for folder in folders])))


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    """compare.json of ordinary and of odd comparisons, by name."""
    place = tmp_path_factory.mktemp("runs")

    def run(name: str, cfg: dict, loss: np.ndarray, **more):
        return write_run(place / name, cfg, loss, **more)

    sweep = write_sweep(place / "four", placements=("pre", "post"), steps=STEPS)
    labels = {"lr_$\\x$_<b>": "constant & long " * 8}
    found = {
        "four": compared(sweep),
        "pair": compared([sweep[0], sweep[3]]),
        "seeds alone": compared(sweep[:3]),
        "short": compared([run(f"short-{n}", config(n), curve(90)) for n in ("layernorm", "rmsnorm")]),
        "no interval": compared([run(f"few-{n}", config(n), curve(300)) for n in ("layernorm", "rmsnorm")]),
        "diverged": compared(
            [*sweep[:6], *(run(f"bad{s}", config("rmsnorm", seed=s), blown_up(at=100 * s)) for s in (4, 5, 6))]
        ),
        "all diverged": compared([run(f"lost-{n}", config(n), blown_up(at=400)) for n in ("layernorm", "rmsnorm")]),
        "bits per byte": compared(
            [
                run(
                    f"bits-{n}",
                    config(n, data__tokenizer=n),
                    curve(STEPS),
                    environment=ENVIRONMENT | {"data": {}, "cpu": n},
                )
                for n in ("layernorm", "rmsnorm")
            ]
        ),
        "long labels": compared(
            [run(f"long-{s}", config(optim__lr=1e-3, optim__warmup=s, **labels), curve(STEPS)) for s in (1, 2, 3)]
            + [run("long", config(optim__lr=3e-3, **labels | {"lr_$\\x$_<b>": "another"}), curve(STEPS), step_ms=12e3)]
        ),
    }
    return found | {
        "two hundred": many(found["pair"]),
        "empty": emptied(found["pair"]),
        "one evaluation": late(found["pair"]),
    }


def many(pair: dict) -> dict:
    """Two hundred variants."""
    result = copy.deepcopy(pair)
    result["variants"] += [pair["variants"][1] | {"label": f"variant {n}"} for n in range(2, 200)]
    result["comparisons"] += [pair["comparisons"][0] | {"candidate": f"variant {n}"} for n in range(2, 200)]
    return result


def emptied(pair: dict) -> dict:
    """What runs that were killed at once would give."""
    result = copy.deepcopy(pair)
    for variant in result["variants"]:
        variant["series"] = {"runs": [{key: [] for key in variant["series"]["runs"][0]}], "step_ms_quantiles": []}
    c = result["comparisons"][0]
    c |= {"gap": None, "why_no_gap": "no step", "final": None, "why_no_final": "no evaluation"}
    c["step_time_ratio"] = {"ratio": None, "why": "too few timed steps"}
    return result


def late(pair: dict) -> dict:
    """A single evaluation, at the end, and no step times."""
    result = copy.deepcopy(pair)
    for variant in result["variants"]:
        series = variant["series"]["runs"][0]
        series |= {key: series[key][-1:] for key in ("val_step", "val")} | {"val_seconds": [None]}
        variant["series"]["step_ms_quantiles"] = []
    return result


SAID = {
    "four": ["C − A", "tolerance ±0.02", "and 1 more", "(3 runs)", "\n10.5 ms\n"],
    "pair": ["A  layernorm-pre", "B − A, rmsnorm-pre against layernorm-pre, on the same batches: No verdict"],
    "seeds alone": ["This is noise"],
    "short": ["no gap: no step after the learning"],
    "no interval": ["too few steps for an interval"],
    "diverged": ["× B diverged at step 400", "× B diverged at step 600"],
    "all diverged": ["× A diverged at step 400", "every run diverged"],
    "bits per byte": ["bits/byte", "not comparable: another cpu"],
    "long labels": [" … ", "$\\x$", " ms"],
    "two hundred": ["and 192 more", "192 more in grey", "rest", "and 196 more"],
    "empty": ["no loss was recorded", "no gap: no step", "n/a: no step was timed", "No verdict: no evaluation"],
    "one evaluation": ["no evaluation after steps that were", "n/a: no step was timed"],
}
"""What each picture says, among other things."""


@pytest.fixture(autouse=True)
def our_style():
    with in_style():
        yield


def drawn_texts(figure) -> list[tuple[str, float, object]]:
    """Words, size in points, and box in pixels of every text that is seen."""
    from matplotlib.text import Text

    figure.draw_without_rendering()
    hidden = set()
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            hidden |= {
                id(t)
                for tick in axis.get_major_ticks()
                if not low <= tick.get_loc() <= high
                for t in tick.findobj(Text)
            }
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip() and id(t) not in hidden]
    return [(t.get_text(), t.get_fontsize(), t.get_window_extent()) for t in texts]


@pytest.mark.parametrize("name", SAID)
def test_every_text_is_there_legible_inside_the_picture_and_free_of_others(results, name):
    figure = figure_of(results[name])
    texts = drawn_texts(figure)
    said = "\n".join(words for words, *_ in texts)
    assert [words for words in SAID[name] if words not in said] == []
    for words, points, box in texts:
        assert points / 72 * README_WIDTH / figure.get_figwidth() >= 11, words
        assert min(box.x0, box.y0, figure.bbox.x1 - box.x1, figure.bbox.y1 - box.y1) >= 0, words
    for (a, _, box_a), (b, _, box_b) in combinations(texts, 2):
        assert not box_a.padded(-1).overlaps(box_b.padded(-1)), f"{a!r} lies on {b!r}"


def test_the_same_bytes_and_no_state_left_behind(results, tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    draw(results["four"], tmp_path / "1.png")
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "black"}):  # as a user's matplotlibrc may say
        draw(results["four"], tmp_path / "2.png")
    png = (tmp_path / "1.png").read_bytes()
    assert png == (tmp_path / "2.png").read_bytes()
    assert dict(matplotlib.rcParams) == before
    width, height = (int.from_bytes(png[i : i + 4], "big") for i in (16, 20))
    assert width == 2 * README_WIDTH
    assert 1300 < height < 1900
    assert png.count(b"tEXt") == 1
    assert b"Software\0normgpt" in png


def test_the_steep_start_does_not_eat_the_scale(results):
    low, high = figure_of(results["pair"]).axes[0].get_ylim()
    assert 1.2 < low < 1.4
    assert high < 2.3  # it starts at 5.4


def test_a_diverged_run_does_not_move_scale_mean_and_band(results):
    whole = figure_of(results["four"] | {"variants": results["four"]["variants"][:2], "comparisons": []}).axes[0]
    lost = figure_of(results["diverged"]).axes[0]
    assert lost.get_ylim()[0] == whole.get_ylim()[0]
    assert lost.get_ylim()[1] < 1.2 * whole.get_ylim()[1]
    crosses = [line for line in lost.lines if line.get_marker() == "x"]
    assert [line.get_xdata()[0] for line in crosses] == pytest.approx([399, 499, 599], abs=2)
    lost.figure.draw_without_rendering()
    words = next(text for text in lost.texts if "diverged" in text.get_text()).get_window_extent()
    assert all(lost.transData.transform(line.get_xydata()[0])[1] < words.y0 for line in crosses)


def test_the_band_goes_from_the_lowest_to_the_highest_seed(results):
    runs = results["four"]["variants"][0]["series"]["runs"]
    band = figure_of(results["four"]).axes[0].collections[0].get_paths()[0].vertices
    last = [run["val"][-1] for run in runs]
    at_end = band[band[:, 0] == STEPS, 1]
    assert (at_end.min(), at_end.max()) == pytest.approx((min(last), max(last)))


def test_seeds_meet_where_the_shortest_has_points():
    runs = [{"x": [0, 2, 4], "y": [0.0, 2.0, 4.0]}, {"x": [0, 3], "y": [1.0, 4.0]}, {"x": [1, 9], "y": [None, None]}]
    grid, rows = over_seeds(runs, "x", "y")
    assert grid.tolist() == [0, 3]
    assert rows.tolist() == [[0, 3], [1, 4]]


def test_one_comparison_shows_its_interval_over_the_last_half(results):
    c = results["pair"]["comparisons"][0]
    ax = figure_of(results["pair"]).axes[1]
    vertices = ax.collections[-1].get_paths()[0].vertices
    assert (vertices[:, 0].min(), vertices[:, 0].max()) == (c["half_from"], STEPS)
    assert (vertices[:, 1].min(), vertices[:, 1].max()) == pytest.approx(tuple(c["gap"]["interval"]))
