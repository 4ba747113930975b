"""torchrun itself: a process that is killed, one that hangs, and what a signal to all of them does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.train.ranks import free_port
from tests.train.runs import metrics

pytestmark = [pytest.mark.seconds(40), pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


@pytest.fixture
def torchrun(tmp_path, text_file):
    """torchrun(*words, launcher=...) -> a started process of two ranks whose run is tmp_path/runs/NAME."""
    base = [
        "data=text", f"data.path={text_file}", f"data.cache_dir={tmp_path}/tokens", f"runs_dir={tmp_path}/runs",
        "device=cpu", "model.n_layer=1", "model.n_embd=16", "model.n_head=1", "model.block_size=16",
        "train.batch_size=4", "train.eval_tokens=64", "train.eval_every=40", "train.sample_chars=0",
        "train.log_every=1", "train.steps=120", "checkpoint.every=20", "compare.report=false",
    ]  # fmt: skip
    started = []

    def start(*words: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
        command += [*launcher, "train.py", *base, *words]
        env = os.environ | {"PYTHONUNBUFFERED": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def until(process: subprocess.Popen, words: str) -> None:
    seen = []
    for line in process.stderr:
        seen.append(line)
        if words in line:
            return
    raise AssertionError("".join(seen))


def rank(process: subprocess.Popen, number: int) -> int:
    """The process id of a rank."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int((path / "stat").read_text().rsplit(")", 1)[1].split()[1]) == process.pid and (
                f"\0RANK={number}\0" in (path / "environ").read_text()
            ):
                return int(path.name)
        except OSError:
            continue
    raise AssertionError(f"there is no rank {number}")


@pytest.mark.parametrize(("strategy", "killed"), [("ddp", 1), ("fsdp", 0)])
def test_a_killed_rank_restarts_all_from_the_last_checkpoint(torchrun, tmp_path, strategy, killed):
    straight = torchrun(f"dist.strategy={strategy}", "name=straight")
    assert straight.wait(120) == 0, straight.stderr.read()
    process = torchrun(f"dist.strategy={strategy}", "name=killed", launcher=("--max-restarts=1",))
    until(process, "step 50/")
    os.kill(rank(process, killed), signal.SIGKILL)
    err = process.communicate(timeout=120)[1]
    assert process.returncode == 0, err
    assert "step 40 of 120" in err
    assert metrics(tmp_path / "runs" / "killed") == metrics(tmp_path / "runs" / "straight")


def test_a_restart_does_not_take_over_a_run_that_another_call_began(torchrun, tmp_path):
    first = torchrun("name=run", "train.stop_at=20")
    assert first.wait(120) == 0
    before = metrics(tmp_path / "runs" / "run")
    second = torchrun("name=run", launcher=("--max-restarts=1",))
    err = second.communicate(timeout=120)[1]
    assert second.returncode != 0
    assert "choose resume=true" in err
    assert metrics(tmp_path / "runs" / "run") == before


def test_a_rank_that_hangs_is_named(torchrun):
    process = torchrun("dist.timeout_s=5", "train.steps=100000")
    until(process, "step 50/")
    os.kill(rank(process, 1), signal.SIGSTOP)
    err = process.communicate(timeout=120)[1]
    assert process.returncode != 0
    assert "error: no step was finished in 5 s: rank 1 does not answer; the others wait for it" in err


@pytest.mark.parametrize(("number", "to_all"), [(signal.SIGTERM, False), (signal.SIGINT, True), (signal.SIGUSR1, True)])
def test_a_signal_saves_on_all_ranks_at_one_step(torchrun, tmp_path, number, to_all):
    handled = ("--signals-to-handle=SIGTERM,SIGINT,SIGUSR1",)
    process = torchrun("train.steps=100000", "name=run", "dist.strategy=fsdp", launcher=handled)
    until(process, "step 30/")
    if to_all:  # as a terminal does
        for n in (0, 1):
            os.kill(rank(process, n), number)
    process.send_signal(number)
    err = process.communicate(timeout=120)[1]
    assert "stopped and saved after step" in err
    saved = int(err.split("stopped and saved after step ")[1].split(";")[0])
    again = torchrun("train.steps=100000", "name=run", "resume=true", f"train.stop_at={saved + 5}")
    assert again.wait(120) == 0
    steps = [r["step"] for r in metrics(tmp_path / "runs" / "run") if "train/loss" in r]
    assert steps == list(range(1, saved + 6))
