"""nanoGPT's CPU setting on the real text, which nanoGPT's README publishes 1.88 for; a model of our kind is below 1.75.

The recorded runs of both norms (results/cpu/nanogpt_cpu.json) end at 1.65 and 1.66. RMSNorm is trained whole; LayerNorm
for the first quarter of the same schedule, where it was measured at 1.99.
"""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT


def val_loss(tmp_path, text, step: int, *words: str) -> float:
    """Of the whole validation split after `step`; evaluated nowhere in between."""
    done = subprocess.run(
        [sys.executable, "train.py", "experiment=nanogpt_cpu", f"data.path={text}", *words,
         "name=run", "device=cpu", "train.eval_every=2000",
         f"runs_dir={tmp_path}/runs", f"data.cache_dir={tmp_path}/tokens"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
    assert summary["step"] == step
    return summary["val/loss"]


@pytest.mark.seconds(150)
def test_rmsnorm_on_nanogpts_cpu_setting(tinyshakespeare, tmp_path):
    assert val_loss(tmp_path, tinyshakespeare, 2000, "norm=rmsnorm") <= 1.75


@pytest.mark.seconds(45)
def test_layernorm_on_the_first_quarter_of_it(tinyshakespeare, tmp_path):
    assert val_loss(tmp_path, tinyshakespeare, 500, "norm=layernorm", "train.stop_at=500") <= 2.08
