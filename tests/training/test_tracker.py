"""metrics.jsonl is strict JSON, and is cut where a resumed run goes on; W&B is never waited for."""

import json
from types import SimpleNamespace

import pytest

from training.config import WandbMode
from training.tracker import Tracker, cut_metrics, lowest
from training.wandb_page import has_wandb_key, wandb_mode


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_appends_strict_json(tmp_path):
    for value in (1.5, float("nan")):
        tracker = Tracker(tmp_path)
        tracker.log([{"step": 1, "train/loss": value}])
        tracker.close({})
    assert lines(tmp_path) == [{"step": 1, "train/loss": 1.5}, {"step": 1, "train/loss": None}]


def test_cut(tmp_path):
    records = [{"step": s, key: 1.0} for s in (0, 1, 2) for key in ("train/loss", "val/loss", "compare/gap")]
    text = "\n".join(json.dumps(r) for r in records) + '\n{"step": 3, "tr'
    (tmp_path / "metrics.jsonl").write_text(text)
    cut_metrics(tmp_path / "metrics.jsonl", 1)
    kept = [(r["step"], next(k for k in r if k != "step")) for r in lines(tmp_path)]
    assert kept == [(0, "train/loss"), (0, "val/loss"), (0, "compare/gap"), (1, "train/loss")]


@pytest.mark.parametrize(("variable", "configured", "mode"), [
    ("offline", WandbMode.online, WandbMode.offline),
    ("", WandbMode.online, WandbMode.offline),  # it would ask for the key
    ("", WandbMode.disabled, WandbMode.disabled),
    ("", WandbMode.auto, WandbMode.offline),
])  # fmt: skip
def test_mode(monkeypatch, tmp_path, variable, configured, mode):
    monkeypatch.setenv("WANDB_MODE", variable)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    assert wandb_mode(configured) == mode


def test_key(monkeypatch, tmp_path):
    netrc = tmp_path / "netrc"
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(netrc))
    assert not has_wandb_key()
    netrc.write_text("machine api.wandb.ai login user password key\n")
    assert has_wandb_key()
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert has_wandb_key()


class WandbRun:
    """A W&B run of which one call raises; `calls` lists the others."""

    sync_dir = "none"

    def __init__(self, broken: str = ""):
        self.broken, self.calls = broken, []
        self.summary = SimpleNamespace(update=lambda summary: self.do("summary", summary))

    def do(self, what: str, *args) -> None:
        if what == self.broken:
            raise RuntimeError("W&B's own\nlong story")
        self.calls.append((what, *args))

    def log(self, record: dict, **_) -> None:
        self.do("log", record)

    def finish(self, exit_code: int) -> None:
        self.do("finish", exit_code)


@pytest.mark.parametrize("broken", ["log", "summary", "finish"])
def test_an_error_of_wandb_is_said_once_and_costs_nothing(tmp_path, capsys, broken):
    wandb_run = WandbRun(broken)
    tracker = Tracker(tmp_path, wandb_run)
    records = [{"step": step, "train/loss": 1.0} for step in range(3)]
    for record in records:
        tracker.log([record])
    tracker.close({"val/loss": 2.0})
    assert lines(tmp_path) == records
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "W&B's own" in said[0]
    assert ("finish", 0) in wandb_run.calls or broken == "finish"


def test_summary_has_the_last_and_the_lowest_loss(tmp_path):
    wandb_run = WandbRun()
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "val/loss": 1.0, "val/bpb": 4.0}\n')  # before it was resumed
    tracker = Tracker(tmp_path, wandb_run)
    tracker.log([{"step": 1, "val/loss": 3.0, "val/bpb": 3.0}, {"step": 2, "val/loss": float("nan")}])
    tracker.close({"val/loss": 3.0})
    (summary,) = [args[0] for what, *args in wandb_run.calls if what == "summary"]
    assert summary == {"val/loss": 3.0, "val/loss_min": 1.0, "val/bpb_min": 3.0}


def test_lowest_of_no_evaluation(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    assert lowest(tmp_path / "metrics.jsonl") == {}


def test_a_comparison_without_wandb_is_attached_to_nothing(tmp_path):
    tracker = Tracker(tmp_path)
    tracker.attach((["norm"], [["rmsnorm"]]), tmp_path / "none.png", tmp_path / "none.html")
    tracker.close({})
