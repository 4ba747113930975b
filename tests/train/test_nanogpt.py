"""nanoGPT's CPU setting on the real text: nanoGPT's README publishes 1.88, and a model of our kind is below 1.75."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.seconds(150)
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_nanogpts_cpu_setting(norm, tinyshakespeare, tmp_path):
    """The whole setting on the whole validation split, evaluated nowhere in between."""
    done = subprocess.run(
        [sys.executable, "train.py", "experiment=nanogpt_cpu", f"data.path={tinyshakespeare}", f"norm={norm}",
         "name=run", "device=cpu", "train.eval_every=2000",
         f"runs_dir={tmp_path}/runs", f"data.cache_dir={tmp_path}/tokens"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
    assert summary["step"] == 2000
    assert summary["val/loss"] <= 1.75
