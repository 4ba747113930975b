"""metrics.jsonl is strict JSON, and is cut where a resumed run goes on; W&B is never waited for."""

import json

import pytest

from training.config import WandbMode
from training.tracker import Tracker, cut_metrics, has_wandb_key, wandb_mode


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
