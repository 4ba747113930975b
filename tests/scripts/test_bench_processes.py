"""The script that times several processes runs, and refuses to run as one."""

import subprocess
import sys

import pytest

from scripts.results import read
from tests.conftest import ROOT
from tests.train.ranks import free_port


@pytest.mark.seconds(40)
def test_it_times_every_strategy_and_every_way_to_save(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    command = [*launcher, "-m", "scripts.bench_processes", "rounds=1", f"to={tmp_path}/rows.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = read(tmp_path / "rows.json")
    cases = ["one thread", "ddp, 2", "fsdp, 2", "no checkpoint", "checkpoint.every=10", "waited for"]
    assert all(case in row["case"] for row, case in zip(rows, cases, strict=True))
    assert all(row["ms"] > 0 for row in rows)
    assert (rows[0]["ratio"], rows[3]["ratio"]) == (1.0, 1.0)
    assert "ddp, 2 processes" in done.stdout


def test_one_process_is_refused():
    done = subprocess.run([sys.executable, "-m", "scripts.bench_processes"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "start it by torchrun" in done.stderr
