"""python -m scripts.compare and scripts.report, as they are typed."""

import json
import os
import shutil
import subprocess
import sys

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


def test_two_runs_are_compared_in_the_folder_of_the_second(pair, capsys):
    a, b = pair
    before = {f.name for f in a.iterdir()}
    run_compare(a, b)
    out = capsys.readouterr().out
    assert "rmsnorm-pre minus layernorm-pre, on the same batches" in out
    assert {f.name for f in b.iterdir()} == before | WRITTEN
    assert {f.name for f in a.iterdir()} == before
    result = json.loads((b / "compare.json").read_text())
    assert result["command"].startswith("python")
    assert result["comparisons"][0]["final"]["difference"] == pytest.approx(0.01)
    assert "| rmsnorm-pre minus layernorm-pre |" in (b / "compare.md").read_text()


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
    kept = shutil.copy(b / "compare.json", tmp_path / "kept.json")
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
        (["{a}", "{b}", "margin=-1"], "margin=-1.0 must be more than 0"),
    ],
)
def test_mistakes(pair, words, message):
    a, b = pair
    before = sorted(a.parent.rglob("*"))
    with pytest.raises(UserError) as raised:
        run_compare(*(word.format(a=a, b=b, runs=a.parent) for word in words))
    assert message in str(raised.value)
    assert sorted(a.parent.rglob("*")) == before


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}"])
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
