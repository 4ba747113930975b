"""W&B: its own reader finds what metrics.jsonl says, and nothing waits for a network."""

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from PIL import Image

import training.run
from errors import UserError
from tests.conftest import ROOT
from tests.train.runs import metrics, run, twin_of
from tests.train.wandb_server import WandbServer, nobody
from training.config import WandbMode
from training.tracker import Tracker
from training.wandb_page import log_comparison_run, start_wandb, teardown


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """W&B keeps one process and its settings for all runs of a Python process: each test has its own."""
    teardown()
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    yield
    teardown()


@pytest.fixture
def online(monkeypatch):
    """online(url): from now on W&B is to be found there, with a key."""

    def at(url: str) -> None:
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", url)
        monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "1")

    return at


def start(folder: Path, mode: WandbMode, run_id: str = "someid"):
    config = {"wandb": {"project": "normgpt"}}
    return start_wandb(folder, config=config, name="run", group=None, tags=[], mode=mode, run_id=run_id)


def inspect(log: Path, *options: str) -> str:
    """What W&B's own reader finds in its log of a run."""
    command = [Path(sys.executable).parent / "wandb", "leet", "inspect", "--json", *options, log]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read(folder: Path) -> list[dict]:
    (log,) = folder.glob("wandb/*run-*/*.wandb")
    return [json.loads(line) for line in inspect(log).splitlines()]


def history(records: list[dict]) -> list[dict]:
    return [r["history"]["item"] for r in records if r["type"] == "history"]


def test_wandb_offline_is_read_by_wandbs_own_reader(small, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    cfg = small("norm=rmsnorm")
    folder = run(cfg, twin_of(cfg, small()))
    for f in (folder, folder.with_name("run-twin")):
        records = read(f)
        rows = history(records)
        assert [r["train/loss"] for r in rows if "train/loss" in r] == [
            r["train/loss"] for r in metrics(f) if "train/loss" in r
        ]
        names = set().union(*rows)
        assert names >= {"train/loss", "train/grad_norm", "train/lr", "val/loss", "val/bpb", "step", "tokens"}
        assert names >= {"time/step_ms", "time/tokens_per_s", "time/data_ms", "time/eval_ms"}

        axes = [r["metric"] for r in records if r["type"] == "metric"]
        assert {"step", "tokens"} <= {m.get("name") for m in axes}
        over_step = {m.get("glob_name", m.get("name")) for m in axes if m.get("step_metric") == "step"}
        assert over_step >= {f"{name.split('/')[0]}/*" for name in names if "/" in name}
        assert {m["name"] for m in axes if m.get("summary") == {"min": True}} == {"val/loss", "val/bpb"}

        (log,) = f.glob("wandb/offline-run-*/*.wandb")
        shown = json.loads(inspect(log, "--summary"))["summary"]
        summary = json.loads((f / "summary.json").read_text())
        measured = {k: v for k, v in summary.items() if v is not None}
        assert {k: shown[k] for k in measured} == pytest.approx(measured)
        for name in ("val/loss", "val/bpb"):
            assert shown[f"{name}_min"] == min(r[name] for r in metrics(f) if name in r)
        config = next(r["run"]["config"]["update"] for r in records if r["type"] == "run")
        saved = yaml.safe_load((f / "config.yaml").read_text())
        assert {k: config[k] for k in saved if k not in ("model", "optim", "train")} == {
            k: saved[k] for k in saved if k not in ("model", "optim", "train")
        }
        assert config["model"]["norm"]["kind"] == saved["model"]["norm"]["kind"]


def test_a_run_without_network_or_key_neither_prompts_nor_stalls(tmp_path, overrides):
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    env |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    args = [o for o in overrides if not o.startswith(("against", "train.steps"))] + ["train.steps=5"]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "train.py", *args], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 60
    assert list((tmp_path / "runs" / "run" / "wandb").glob("offline-run-*"))


@pytest.mark.parametrize("how", ["refuses", "swallows", "accepts"])
@pytest.mark.seconds(8)
def test_an_unreachable_wandb_costs_seconds_and_one_line(tmp_path, overrides, train_py, online, monkeypatch, how):
    seconds = []

    def timed(*args, **kwargs):
        began = time.monotonic()
        wandb_run = start_wandb(*args, **kwargs)
        seconds.append(time.monotonic() - began)
        return wandb_run

    monkeypatch.setattr(training.run, "start_wandb", timed)
    args = [o for o in overrides if not o.startswith("train.steps")] + ["train.steps=5"]
    with nobody(how) as url:
        online(url)
        done = train_py(*args)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("W&B") == done.stderr.count("out of reach") == 1  # both twins learn of it once
    assert "wandb:" not in done.stderr
    assert len(seconds) == 2
    assert sum(seconds) < 8
    for name in ("run", "run-layernorm"):
        assert list((tmp_path / "runs" / name / "wandb").glob("offline-run-*"))


def test_a_server_that_goes_in_the_middle_of_a_run_costs_no_step(tmp_path, overrides, train_py, online, monkeypatch):
    args = [o for o in overrides if not o.startswith("train.steps")] + ["train.steps=20"]
    waits = []

    def log(tracker: Tracker, records: list[dict]) -> None:
        if len(waits) == 20:
            server.fall("gone")
        began = time.monotonic()
        real_log(tracker, records)
        waits.append(time.monotonic() - began)

    real_log = Tracker.log
    monkeypatch.setattr(Tracker, "log", log)
    with WandbServer() as server:
        online(server.url)
        done = train_py(*args)
    assert done.returncode == 0, done.stderr
    assert max(waits) < 1
    assert "Traceback" not in done.stderr
    assert "wandb:" not in done.stderr
    said = [line for line in done.stderr.splitlines() if "W&B" in line]
    assert len(said) == 2  # each run has a folder to send
    for name, line in zip(("run-layernorm", "run"), said, strict=True):
        folder = tmp_path / "runs" / name
        (log_of_wandb,) = folder.glob("wandb/run-*/*.wandb")
        assert f"`wandb sync {log_of_wandb.parent}`" in line
        losses = [r["train/loss"] for r in metrics(folder) if "train/loss" in r]
        assert len(losses) == 20
        assert [r["train/loss"] for r in history(read(folder)) if "train/loss" in r] == losses


@pytest.mark.parametrize("how", ["hangs", "fails", "refuses"])
def test_a_server_that_falls_ill_is_waited_for_seconds(tmp_path, online, capfd, how):
    with WandbServer() as server:
        online(server.url)
        tracker = Tracker(tmp_path, start(tmp_path, WandbMode.online))
        for step in range(50):
            if step == 25:
                server.fall(how)
            began = time.monotonic()
            tracker.log([{"step": step, "train/loss": 1.0 + step}])
            assert time.monotonic() - began < 1
        began = time.monotonic()
        tracker.close({})
        assert time.monotonic() - began < 3  # WANDB_FINISH_TIMEOUT is 1 here
    assert [r["train/loss"] for r in history(read(tmp_path)) if "train/loss" in r] == [1.0 + s for s in range(50)]
    (said,) = capfd.readouterr().err.splitlines()
    assert "kept locally" in said
    assert f"`wandb sync {next(tmp_path.glob('wandb/run-*'))}`" in said


def test_a_server_that_hangs_does_not_hold_up_the_end_of_the_process(tmp_path, online):
    script = f"""
from pathlib import Path
from tests.train.test_wandb import start
from tests.train.wandb_server import WandbServer
from training.config import WandbMode
from training.tracker import Tracker
import os
server = WandbServer()
os.environ["WANDB_BASE_URL"] = server.url
tracker = Tracker(Path({str(tmp_path)!r}), start(Path({str(tmp_path)!r}), WandbMode.online))
server.fall("hangs")
tracker.close({{}})
print("closed", flush=True)
"""
    online("")
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "closed\n"
        began = time.monotonic()
        assert process.wait() == 0
        assert time.monotonic() - began < 5  # W&B's own telemetry would wait for 10 s


def test_a_server_that_goes_between_twins_leaves_the_first_its_page(tmp_path, online, monkeypatch, capsys):
    monkeypatch.setattr("training.wandb_page.INIT_TIMEOUT_S", 1)
    with WandbServer() as server:
        online(server.url)
        for name in "ab":
            (tmp_path / name).mkdir()
        first = start(tmp_path / "a", WandbMode.online, "a")
        server.fall("gone")
        second = start(tmp_path / "b", WandbMode.online, "b")
        for name, wandb_run in (("a", first), ("b", second)):
            tracker = Tracker(tmp_path / name, wandb_run)
            tracker.log([{"step": 1, "train/loss": 1.0}])
            tracker.close({})
    assert (first.offline, second.offline) == (False, True)
    for wandb_run in (first, second):
        assert '"train/loss":1' in inspect(next(Path(wandb_run.sync_dir).glob("*.wandb")))
    said = capsys.readouterr().err.splitlines()
    assert ["out of reach" in line for line in said] == [True, False]
    assert first.sync_dir in said[1]


def test_a_run_goes_on_when_wandbs_own_process_dies(tmp_path, capsys):
    tracker = Tracker(tmp_path, start(tmp_path, WandbMode.offline))
    for process in [o for o in gc.get_objects() if type(o) is subprocess.Popen and "wandb-core" in str(o.args)]:
        process.kill()
        process.wait()
    records = [{"step": step, "train/loss": 1.0} for step in range(40)]
    for record in records:
        tracker.log([record])
        time.sleep(0.01)
    tracker.close({})
    assert metrics(tmp_path) == records
    (said,) = capsys.readouterr().err.splitlines()
    assert "W&B failed" in said
    again = start(tmp_path, WandbMode.offline, "another")  # a sweep's next job
    assert again is not None
    Tracker(tmp_path, again).close({})


def test_a_name_that_wandb_refuses_is_a_users_mistake(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "a/b")
    with pytest.raises(UserError, match="a/b"):
        start(tmp_path, WandbMode.offline)


@pytest.fixture
def comparison(tmp_path) -> dict:
    Image.new("RGB", (8, 8)).save(tmp_path / "curves.png")
    (tmp_path / "report.html").write_text("<p>rmsnorm against layernorm</p>")
    table = (["norm", "val/loss"], [["layernorm", 2.5], ["rmsnorm", None]])
    return {"table": table, "png": tmp_path / "curves.png", "html": tmp_path / "report.html"}


MEDIA = {"comparison/table": "table-file", "comparison/curves": "image-file", "comparison/report": "html-file"}


def check_media(folder: Path) -> None:
    """One row of the history names a table, a picture and a page, which lie in the run's files."""
    (row,) = [r for r in history(read(folder)) if "comparison/curves._type" in r]
    (files,) = folder.glob("wandb/*run-*/files")
    for name, kind in MEDIA.items():
        assert row[f"{name}._type"] == kind
        assert (files / row[f"{name}.path"]).stat().st_size


def test_a_comparison_is_attached_to_an_offline_run(tmp_path, comparison):
    tracker = Tracker(tmp_path, start(tmp_path, WandbMode.offline))
    tracker.log([{"step": 3, "train/loss": 1.0}])
    tracker.attach(**comparison)
    tracker.close({"val/loss": 2.0})
    check_media(tmp_path)


def test_attaching_to_a_server_that_hangs_is_bounded(tmp_path, comparison, online, capfd, monkeypatch):
    monkeypatch.setattr("training.wandb_page.ATTACH_TIMEOUT_S", 1)
    with WandbServer() as server:
        online(server.url)
        tracker = Tracker(tmp_path, start(tmp_path, WandbMode.online))
        server.fall("hangs")
        began = time.monotonic()
        tracker.attach(**comparison)
        tracker.close({})
        assert time.monotonic() - began < 5
    assert any("comparison/curves.path" in row for row in history(read(tmp_path)))
    (said,) = capfd.readouterr().err.splitlines()
    assert "kept locally" in said


def test_a_sweeps_comparison_is_one_run_however_often_it_is_made(tmp_path, comparison, online, monkeypatch):
    summary = {"gap": 0.25}
    about = comparison | {"project": "normgpt", "group": "sweep", "name": "pre and post", "summary": summary}
    with WandbServer() as server:
        online(server.url)
        monkeypatch.setenv("WANDB_PROJECT", "another")
        monkeypatch.setenv("WANDB_ENTITY", "team")
        monkeypatch.setenv("WANDB_TAGS", "a,b")
        for folder in ("once", "twice"):
            log_comparison_run(tmp_path / folder, mode=WandbMode.online, **about)
            check_media(tmp_path / folder)
        made = [v for v in server.variables("UpsertBucket") if v["displayName"]]
    assert [(v["jobType"], v["groupName"], v["project"], v["entity"]) for v in made] == [
        ("comparison", "sweep", "another", "team")
    ] * 2
    assert [v["tags"] for v in made] == [["a", "b"]] * 2
    assert len({v["name"] for v in made}) == 1
    teardown()
    with nobody("refuses") as url:
        monkeypatch.setenv("WANDB_BASE_URL", url)
        monkeypatch.setattr("training.wandb_page.INIT_TIMEOUT_S", 1)
        log_comparison_run(tmp_path / "away", mode=WandbMode.online, **about)
    (log,) = (tmp_path / "away").glob("wandb/offline-run-*/*.wandb")
    assert log.name == f"run-{made[0]['name']}.wandb"  # the same run, once `wandb sync` sends it
    assert json.loads(inspect(log, "--summary"))["summary"]["gap"] == 0.25
    log_comparison_run(tmp_path / "off", mode=WandbMode.disabled, **about)
    assert not (tmp_path / "off").exists()
