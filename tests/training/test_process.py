import os
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT
from training.environment import describe

linux = pytest.mark.skipif(sys.platform != "linux", reason="what Linux and glibc do")

STEPS = """
import resource, torch
from training.process import forget_process_peak, keep_freed_memory, process_peak_mib

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.zeros(16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

without = faults()
keep_freed_memory()
kept, held = [faults() for _ in range(10)][-1], process_peak_mib()
forget_process_peak()
print(without, kept, held - process_peak_mib())
"""


def python(*args: str, **environ: str) -> subprocess.CompletedProcess:
    outside = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    return subprocess.run([sys.executable, *args], cwd=ROOT, env=outside | environ, capture_output=True, text=True)


@linux
def test_steps_use_the_memory_of_the_step_before_and_a_later_run_does_not_count_it():
    without, kept, forgotten = map(float, python("-c", STEPS).stdout.split())
    assert without > 10_000  # pages of 4 KiB, of four times 64 MiB
    assert kept < 100  # once the heap has grown to what a step takes
    assert forgotten > 60


@linux
@pytest.mark.parametrize(
    ("given", "spins"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "0")]
)
def test_threads_give_up_their_core_soon_unless_told_otherwise(given, spins):
    said = python("train.py", "--help", **given, OMP_DISPLAY_ENV="verbose").stderr
    assert f"GOMP_SPINCOUNT = '{spins}'" in said


def test_how_threads_wait_is_on_record(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert describe(torch.device("cpu"))["openmp"]["OMP_WAIT_POLICY"] == "PASSIVE"
