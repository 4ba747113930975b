"""report.html: a file that stands alone; opened in Chromium, its curves are there and no request leaves it."""

import copy
import json
import re
import shutil

import pytest

from compare import report
from compare.comparison import compare
from compare.page import MOST_RUNS, write_page
from records import load_run
from tests.compare.fake_runs import write_sweep

pytest.importorskip("plotly")
pytestmark = [pytest.mark.xdist_group("browser"), pytest.mark.seconds(1)]

NASTY = """<b>&"'$x$</b></script><script>document.title = "run"</script>"""
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict:
    """Two norms in two placements, two seeds each; the second variant's name and a note try to be markup."""
    folders = write_sweep(tmp_path_factory.mktemp("runs"), placements=("pre", "post"), seeds=(1, 2), steps=700)
    text = json.dumps(compare([load_run(folder) for folder in folders]))
    nasty = json.loads(text.replace('"rmsnorm-pre"', json.dumps(NASTY)))
    return nasty | {"notes": [NASTY], "command": f"python train.py {NASTY}"}


@pytest.fixture(scope="module")
def page_file(result, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(result, path)
    return path


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("neither chromium nor google-chrome is installed")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page(browser, page_file):
    """The page, opened; `page.seen` collects requests, console lines and errors."""
    page = browser.new_page(viewport={"width": 1000, "height": 800})
    page.seen = []
    page.on("request", lambda request: page.seen.append(request.url))
    page.on("console", lambda line: page.seen.append(line.text))
    page.on("pageerror", lambda error: page.seen.append(str(error)))
    page.goto(page_file.as_uri())
    page.wait_for_selector("#times .violinlayer path")
    return page


def without_scripts(path) -> str:
    return re.sub(r"<(script|style)>.*?</\1>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_nothing_in_the_file_is_fetched_or_run_that_is_not_ours(page_file):
    html = page_file.read_text(encoding="utf-8")
    assert html.startswith("<!DOCTYPE html>")
    assert html.count("</script>") == 2
    text = without_scripts(page_file)
    assert re.search(r"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline'; ", text)
    assert not re.search(r"<link|<script|<img|<iframe|\s(src|href)=|https?://|<b>&\"", text)


def test_the_text_holds_verdicts_tables_origins_and_definitions(result, page_file):
    text = without_scripts(page_file)
    for c in result["comparisons"]:
        assert report.verdict_sentence(c, result["unit"]).split(": ")[1] in text.replace("&amp;", "&")
    assert text.count("<table>") == 4  # runs, comparisons, what differs, environment
    for words in (
        "model.placement",
        "git_commit",
        "abc123",
        "versions.torch",
        "Configuration of layernorm-post",
        "warmup: 100",
    ):
        assert words in text
    for words in ("90 % interval", "gap_abs", "forward, backward, clipping and optimiser"):
        assert words in text


def test_what_is_missing_is_said(result, tmp_path):
    empty = copy.deepcopy(result)
    for variant in empty["variants"]:
        variant["series"]["step_ms_quantiles"] = []
        for curves in variant["series"]["runs"]:
            curves |= {key: [] for key in curves}
    for c in empty["comparisons"]:
        c |= {"gap": None, "why_no_gap": "no step", "final": None, "why_no_final": "no evaluation"}
        del c["overlap"], c["overlap_paired"]
        c["step_time_ratio"] = {"ratio": None, "why": "another cpu"}
    write_page(empty, tmp_path / "report.html")
    text = without_scripts(tmp_path / "report.html")
    assert text.count("Nothing to draw.") == 4
    assert "No gap: no step." in text
    assert "Not comparable: another cpu." in text


def test_of_many_variants_the_first_are_drawn(result, tmp_path):
    many = copy.deepcopy(result)
    many["variants"] += [result["variants"][0] | {"label": f"variant {n}"} for n in range(196)]
    many["differs"] = {key: values + [None] * 196 for key, values in many["differs"].items()}
    write_page(many, tmp_path / "report.html")
    assert f"The curves are those of the first {MOST_RUNS // 2} of 200 variants." in without_scripts(
        tmp_path / "report.html"
    )
    assert (tmp_path / "report.html").stat().st_size < 7e6


class TestInTheBrowser:
    def test_the_curves_are_there(self, result, page):
        runs = [curves for variant in result["variants"] for curves in variant["series"]["runs"]]
        assert page.locator("#losses .scatterlayer .trace").count() == 2 * len(runs)
        assert page.locator("#seconds .scatterlayer .trace").count() == len(runs)
        assert page.locator("#times .violinlayer .trace.violins").count() == len(result["variants"])
        assert page.locator("#seconds .point").count() == sum(len(curves["val"]) for curves in runs)
        path = page.locator("#losses .scatterlayer .js-line").last.get_attribute("d")
        assert len(re.findall(r"-?[\d.]+,-?[\d.]+", path)) > 100
        low, high = page.evaluate("document.getElementById('losses').layout.yaxis.range")
        assert 1.2 < low < high < 2.3

    def test_gaps_have_mean_and_interval(self, result, page):
        traces = page.evaluate("document.getElementById('gaps').data")
        assert len({trace["legendgroup"] for trace in traces}) == len(result["comparisons"]) == 4
        gap = result["comparisons"][0]["gap"]
        assert any(trace["y"] == [gap["gap"]] * 2 for trace in traces)
        assert any(set(trace["y"]) == set(gap["interval"]) for trace in traces)

    def test_a_click_in_the_legend_hides_and_shows_a_variant(self, page):
        traces = page.locator("#losses .scatterlayer .trace")
        before = traces.count()
        for expected in (before - 4, before):  # two runs, training and validation
            page.locator("#losses .legendtoggle").nth(1).click()
            page.wait_for_function(
                "n => document.querySelectorAll('#losses .scatterlayer .trace').length === n",
                arg=expected,
                timeout=5000,
            )

    def test_names_are_text(self, page):
        assert page.locator("#losses .legendtext").nth(1).text_content() == NASTY
        assert page.locator("li", has_text=NASTY).count() > 0
        assert page.title() == "4 variants"

    def test_hovering_names_the_run(self, page):
        page.locator("#seconds").hover(position={"x": 500, "y": 250})
        page.locator("#seconds .hoverlayer").get_by_text("-s1, validation : 1.").first.wait_for(timeout=5000)

    def test_an_image_can_be_saved(self, page):
        with page.expect_download(timeout=10_000) as download:
            page.locator("#gaps").hover()
            page.locator("#gaps [data-title^='Download']").click()
        assert download.value.path().read_bytes().startswith(b"\x89PNG")

    def test_it_is_quiet_and_no_request_can_leave_it(self, page, page_file):
        assert [seen for seen in page.seen if not seen.startswith(("data:", "blob:"))] == [page_file.as_uri()]
        tried = page.evaluate("fetch('https://example.org').then(() => 'went', error => error.message)")
        assert tried != "went"
        assert "Content Security Policy" in " ".join(page.seen[1:])

    def test_without_scripts_there_are_words_and_tables(self, browser, page_file):
        context = browser.new_context(java_script_enabled=False, viewport={"width": 380, "height": 700})
        page = context.new_page()
        page.goto(page_file.as_uri())
        assert page.get_by_text("The curves need JavaScript").is_visible()
        assert page.locator("table").first.is_visible()
        context.close()
