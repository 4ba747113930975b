"""Two machines, as two network namespaces with a cable between them: they train, and a cut of it never hangs them."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.train.runs import metrics

pytestmark = [pytest.mark.seconds(60), pytest.mark.xdist_group("two machines")]
PORT, TIMEOUT_S = 29611, 5


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def machines():
    """Names of two namespaces, at 10.77.0.1 and 10.77.0.2; the test is skipped where they may not be made."""
    names = [f"normgpt{os.getpid()}-{n}" for n in (0, 1)]
    try:
        for n, name in enumerate(names):
            ip("netns", "add", name)
            if n == 0:
                ip("-n", name, "link", "add", "cable", "type", "veth", "peer", "name", "other")
            else:
                ip("-n", names[0], "link", "set", "other", "netns", name)
                ip("-n", name, "link", "set", "other", "name", "cable")
            ip("-n", name, "addr", "add", f"10.77.0.{n + 1}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
            # torchrun itself waits for its store until TCP gives up, by default for 15 minutes
            ip("netns", "exec", name, "sh", "-c", "echo 5 > /proc/sys/net/ipv4/tcp_retries2")
        yield names
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"network namespaces cannot be made here: {getattr(e, 'stderr', None) or e}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture
def pair(machines, tmp_path, text_file):
    """pair(*words) -> torchrun's process on each machine, one rank each, and the files that they print to."""
    base = [
        "data=text", f"data.path={text_file}", f"data.cache_dir={tmp_path}/tokens", f"runs_dir={tmp_path}/runs",
        "name=run", "device=cpu", "model.n_layer=1", "model.n_embd=16", "model.n_head=1", "model.block_size=16",
        "train.batch_size=4", "train.eval_tokens=64", "train.sample_chars=0", "train.log_every=1",
        "checkpoint.every=20", "compare.report=false", f"dist.timeout_s={TIMEOUT_S}",
    ]  # fmt: skip
    started = []

    def start(*words: str, restarts: int = 0) -> tuple[list[subprocess.Popen], list[Path]]:
        logs = [tmp_path / f"machine{n}.log" for n in (0, 1)]
        for n, name in enumerate(machines):
            command = [
                "ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
                "--nproc_per_node=1", f"--max-restarts={restarts}", "--rdzv_backend=c10d", "--rdzv_id=test",
                f"--rdzv_conf=is_host={int(n == 0)}", f"--rdzv_endpoint=10.77.0.1:{PORT}",
                f"--local_addr=10.77.0.{n + 1}", "train.py", *base, *words,
            ]  # fmt: skip
            env = os.environ | {"GLOO_SOCKET_IFNAME": "cable", "PYTHONUNBUFFERED": "1"}
            with open(logs[n], "w") as log:
                started.append(
                    subprocess.Popen(command, cwd=ROOT, env=env, stderr=log, stdout=log, start_new_session=True)
                )
        return started, logs

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def pids(machine: str) -> list[int]:
    return [int(pid) for pid in subprocess.run(["ip", "netns", "pids", machine], capture_output=True).stdout.split()]


def until(logs: list[Path], words: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not any(words in log.read_text() for log in logs):
        assert time.monotonic() < end, [log.read_text() for log in logs]
        time.sleep(0.1)


def wait(processes: list[subprocess.Popen], logs: list[Path], seconds: float) -> list[int]:
    try:
        end = time.monotonic() + seconds
        return [process.wait(max(0.1, end - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        raise AssertionError([log.read_text() for log in logs]) from None


def test_two_machines_train_through_a_short_cut(pair, machines, tmp_path):
    processes, logs = pair("train.steps=300", "dist.strategy=fsdp")
    until(logs, "step 50/")
    ip("-n", machines[0], "link", "set", "cable", "down")
    time.sleep(1)
    ip("-n", machines[0], "link", "set", "cable", "up")
    assert wait(processes, logs, 120) == [0, 0], [log.read_text() for log in logs]
    steps = [r["step"] for r in metrics(tmp_path / "runs" / "run") if "train/loss" in r]
    assert steps == list(range(1, 301))


def test_a_long_cut_ends_both_with_a_clear_error(pair, machines):
    processes, logs = pair("train.steps=100000")
    until(logs, "step 50/")
    ip("-n", machines[0], "link", "set", "cable", "down")
    try:
        statuses = wait(processes, logs, 120)
    finally:
        ip("-n", machines[0], "link", "set", "cable", "up")
    assert all(statuses), statuses
    assert "error: no step was finished in 5 s: rank 1 does not answer" in logs[0].read_text()
    assert "error: no step was finished in 5 s: rank 1 cannot reach the others" in logs[1].read_text()


def test_a_rank_killed_on_one_machine_restarts_both(pair, machines, tmp_path):
    processes, logs = pair("train.steps=120", restarts=2)
    until(logs, "step 50/")
    workers = [pid for pid in pids(machines[1]) if b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes()]
    assert len(workers) == 1
    os.kill(workers[0], signal.SIGKILL)
    assert wait(processes, logs, 120) == [0, 0], [log.read_text() for log in logs]
    assert re.search("step (20|40|60|80|100) of 120", "".join(log.read_text() for log in logs))
    steps = [r["step"] for r in metrics(tmp_path / "runs" / "run") if "train/loss" in r]
    assert steps == list(range(1, 121))


def test_one_machine_killed_ends_the_other(pair, machines):
    processes, logs = pair("train.steps=100000")
    until(logs, "step 50/")
    os.killpg(processes[1].pid, signal.SIGKILL)
    for pid in pids(machines[1]):
        os.kill(pid, signal.SIGKILL)
    assert wait(processes[:1], logs, 120) != [0]
    assert "lost the connection to another process" in logs[0].read_text()
