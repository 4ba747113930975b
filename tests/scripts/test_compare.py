"""python -m scripts.compare and scripts.report, as they are typed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from errors import UserError
from scripts import compare, report
from scripts.options import parse
from tests.compare.fake_runs import config, curve, write_run, write_sweep
from tests.conftest import ROOT

WRITTEN = {"compare.json", "compare.md", "compare.png", "report.html"}


def run_compare(*words) -> None:
    compare.main(parse(compare.Options, list(map(str, words))))


@pytest.fixture
def pair(tmp_path):
    """Two runs; one has a name as overrides make it."""
    a = write_run(tmp_path / "runs" / "a", config(), curve(300))
    return a, write_run(tmp_path / "runs" / "b-optim.lr=0.001", config("rmsnorm"), curve(300, offset=0.01))


def place_of(*folders) -> Path:
    return compare.place_of([folder.resolve() for folder in folders])


def test_two_runs_are_compared_in_a_folder_beside_them(pair, capsys):
    a, b = pair
    before = {f: f.read_bytes() for f in a.parent.rglob("*") if f.is_file()}
    run_compare(a, b)
    out = capsys.readouterr().out
    assert "rmsnorm-pre minus layernorm-pre, on the same batches" in out
    assert {f: f.read_bytes() for f in a.parent.glob("[ab]*/*") if f.is_file()} == before
    place = place_of(a, b)
    assert {f.name for f in place.iterdir()} == WRITTEN
    assert f"wrote {place}/report.html" in out
    run_compare(b, a)  # the other way round is another comparison
    assert len(list(a.parent.glob("compare-*"))) == 2
    result = json.loads((place / "compare.json").read_text())
    assert result["command"].startswith("python")
    assert result["comparisons"][0]["final"]["difference"] == pytest.approx(0.01)
    assert "| rmsnorm-pre minus layernorm-pre |" in (place / "compare.md").read_text()


def test_more_go_into_a_folder_of_their_own_which_is_passed_over_next_time(tmp_path, capsys):
    folders = write_sweep(tmp_path, steps=300)
    run_compare(*folders)
    (place,) = tmp_path.glob("compare-*")
    assert {f.name for f in place.iterdir()} == WRITTEN
    assert "rmsnorm-pre" in capsys.readouterr().out
    run_compare(*sorted(tmp_path.iterdir()))
    assert len(list(tmp_path.glob("compare-*"))) == 1
    run_compare(*folders, f"to={tmp_path}/here", "margin=5")
    assert json.loads((tmp_path / "here" / "compare.json").read_text())["comparisons"][0]["verdict"] == "equivalent"


def test_a_report_is_drawn_again_from_its_json_alone(pair, tmp_path, capsys):
    a, b = pair
    run_compare(a, b)
    first = capsys.readouterr().out
    kept = shutil.copy(place_of(a, b) / "compare.json", tmp_path / "kept.json")
    shutil.rmtree(tmp_path / "runs")
    report.main(parse(report.Options, [str(kept), f"to={tmp_path}/again"]))
    assert capsys.readouterr().out.split("wrote")[0] == first.split("wrote")[0]
    assert {f.name for f in (tmp_path / "again").iterdir()} == WRITTEN
    assert (tmp_path / "again" / "compare.json").read_text() == (tmp_path / "kept.json").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give two runs or more, like runs/A runs/B; got none"),
        (["{a}"], "give two runs or more"),
        (["{a}", "{a}"], "give two runs or more"),
        (["{a}", "{runs}"], "is no run: it has no config.yaml; runs in it: a, b"),
        (["{a}", "nowhere"], "nowhere is no run"),
        (["{a}", "{b}", "to={a}/config.yaml"], "is a file; it must be a folder"),
        (["{a}", "{b}", "margn=1"], "no option 'margn'; near names: margin"),
        (["{a}", "{b}", "margin=wide"], "margin=wide must be a number"),
        (["{a}", "{b}", "margin=inf"], "margin=inf must be a number above 0"),
        (["{a}", "{b}", "margin=-1"], "margin=-1.0 must be a number above 0"),
    ],
)
def test_mistakes(pair, words, message):
    a, b = pair
    before = sorted(a.parent.rglob("*"))
    with pytest.raises(UserError) as raised:
        run_compare(*(word.format(a=a, b=b, runs=a.parent) for word in words))
    assert message in str(raised.value)
    assert sorted(a.parent.rglob("*")) == before


def test_names_are_printed_as_they_are(tmp_path, capsys):
    a = write_run(tmp_path / "[b]a :smile:", config(data__source="x[/b]y"), curve(300))
    b = write_run(tmp_path / "b [x]", config(data__source="[red]"), curve(300))
    run_compare(a, b, f"to={tmp_path}/out [y]")
    out = capsys.readouterr().out
    for words in ("source=x[/b]y", "source=[red]", f"wrote {tmp_path}/out [y]/report.html"):
        assert words in out


def test_a_place_that_cannot_be_written_is_said_without_a_traceback(pair):
    words = [sys.executable, "-m", "scripts.compare", *pair, "to=/proc/nowhere"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: /proc/nowhere")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}", '{"variants": [], "comparisons": [], "unit": "x"}'])
def test_a_report_of_nothing(tmp_path, content):
    if content is not None:
        (tmp_path / "compare.json").write_text(content)
    with pytest.raises(UserError, match=r"python -m scripts\.compare RUN RUN makes one"):
        report.main(report.Options([str(tmp_path)]))


@pytest.mark.seconds(15)
@pytest.mark.skipif(not hasattr(os, "wait4"), reason="the memory of a child is not told here")
def test_two_hundred_runs_of_ten_thousand_steps(tmp_path):
    for norm, offset in (("layernorm", 0.0), ("rmsnorm", -0.004)):
        loss = curve(10_000, offset=offset, noise=0.01)
        first = write_run(tmp_path / f"{norm}-0", config(norm, seed=0), loss)
        for seed in range(1, 100):
            folder = write_run(tmp_path / f"{norm}-{seed}", config(norm, seed=seed), loss[:1])
            (folder / "metrics.jsonl").unlink()
            os.link(first / "metrics.jsonl", folder / "metrics.jsonl")
    words = [sys.executable, "-m", "scripts.compare", *sorted(tmp_path.iterdir()), f"to={tmp_path}/all"]
    child = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    assert usage.ru_utime + usage.ru_stime < 20
    assert usage.ru_maxrss < 1024 * (1 if sys.platform != "darwin" else 1024) * 1024
    assert json.loads((tmp_path / "all" / "compare.json").read_text())["comparisons"][0]["n_seeds"] == [100, 100]
