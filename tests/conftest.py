"""Shared by all tests. Triton reads TRITON_INTERPRET when it is imported, so it is set before anything else."""

import argparse
import os
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["WANDB_MODE"] = "disabled"

import pytest
import torch
from hydra import compose, initialize_config_dir

from configs.cli import to_config
from configs.schema import Config, register

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def one_thread():
    """Tests are small, and two cores may have more to do than one test; determinism is tested with two."""
    torch.set_num_threads(1)


@pytest.fixture
def tinyshakespeare() -> Path:
    """nanoGPT's text, from TINYSHAKESPEARE or ../shared/data/; the test is skipped where it is in neither place."""
    path = Path(os.environ.get("TINYSHAKESPEARE", ROOT.parent / "shared" / "data" / "tinyshakespeare.txt"))
    if not path.exists():
        pytest.skip(f"tinyshakespeare is not at {path}; TINYSHAKESPEARE=FILE says where it is")
    return path


@pytest.fixture
def text_file(tmp_path) -> Path:
    """About 100 KB of real text."""
    path = tmp_path / "text.txt"
    path.write_text(Path(argparse.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    return path


@pytest.fixture
def small(tmp_path, text_file):
    """small(*overrides) -> Config of a model and a run of seconds, in a folder of the test's own."""
    register()
    base = [
        "data=text", f"data.path={text_file}", f"data.cache_dir={tmp_path}/tokens",
        f"runs_dir={tmp_path}/runs", "name=run",
        "model.n_layer=2", "model.n_head=2", "model.n_embd=32", "model.block_size=32",
        "train.steps=20", "train.batch_size=4", "train.eval_tokens=512", "train.eval_every=10", "train.log_every=5",
        "optim.warmup=4", "checkpoint.every=0", "train.sample_chars=0", "device=cpu",
    ]  # fmt: skip

    def compose_small(*overrides: str) -> Config:
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            return to_config(compose("train", [*base, *overrides]))

    return compose_small
