"""Eight kills in a short form of scripts.check_resume, and that it sees a resumption that is broken."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.seconds(60), pytest.mark.skipif(sys.platform != "linux", reason="forks processes")]


def check(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *args], cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_killed_runs_end_as_undisturbed_ones():
    done = check("-m", "scripts.check_resume", "runs=3", "kills=4", "seed=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 runs end with the weights and records of an undisturbed one" in done.stdout
    (kills,) = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("all ")]
    assert int(kills) >= 8


def test_a_resumption_without_its_weights_is_seen():
    broken = (
        "from training import checkpoint; checkpoint.restore = lambda folder, into: None\n"
        "from scripts import check_resume\n"
        "check_resume.main(check_resume.Options(runs=2, kills=2))"
    )
    done = check("-c", broken)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "differs in best/" in done.stdout
    assert "metrics.jsonl" in done.stdout
