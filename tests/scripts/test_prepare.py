"""What scripts.prepare and scripts.inspect print and refuse, and a short form of scripts.bench_prepare."""

import os
import subprocess
import sys

import numpy as np
import pytest

from data import tokens
from scripts import inspect, prepare
from scripts.options import run_as_train
from scripts.results import read
from tests.conftest import ROOT


@pytest.fixture
def script(monkeypatch, capsys):
    """script(module, *words) -> exit status, what it printed, and its error."""

    def call(module, *words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["it", *words])
        status = 0
        try:
            run_as_train(module.main, module.__doc__)
        except SystemExit as e:
            status = e.code
        return (status, *capsys.readouterr())

    return call


@pytest.fixture
def words(tmp_path) -> list[str]:
    """Twenty documents: 19 short ones, and "long " 100 times."""
    (tmp_path / "texts").mkdir()
    for i in range(20):
        (tmp_path / f"texts/{i:02}.txt").write_text("long " * 100 if i == 7 else f"document {i}\n")
    return ["data=text", f"data.path={tmp_path}/texts", f"data.cache_dir={tmp_path}/cache"]


def test_prepare_says_where_the_tokens_are(script, words, tmp_path):
    status, out, err = script(prepare, *words)
    (folder,) = (tmp_path / "cache").iterdir()
    assert (status, err) == (0, "")
    assert out.splitlines()[0].startswith("prepared 739 tokens (bytes)")
    assert out.splitlines()[1] == f"{folder}: 661 train and 78 val tokens of bytes, uint16"
    assert script(prepare, *words)[1].splitlines() == out.splitlines()[1:]


def test_inspect_shows_what_there_is(script, words):
    status, out, _ = script(inspect, *words)
    assert status == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    # 719 characters, of which 647 train and hold 14 documents; end-of-text before each
    assert "train 661 89.45% 14 0.0 1.00 22 of 257" in lines
    assert "val 78 10.55% 6 0.0 1.00 18 of 257" in lines
    assert any(line.startswith("501 ") and "'long long" in line for line in lines)
    assert "2 token files, whole by their checksums" in out
    assert "13 648 'document 13\\n'" in lines
    assert "most frequent: ' ' 17.1%" in out
    assert "at token 0: 'document 0\\n<|endoftext|>document 1\\n" in out


def test_inspect_holds_large_files_against_their_checksums(script, words, tmp_path, monkeypatch):
    script(prepare, *words)
    monkeypatch.setattr(tokens, "CHECKED_WHOLE", 0)
    monkeypatch.setattr("data.shards.END_BYTES", 16)
    (path,) = (tmp_path / "cache").glob("*/train_000.bin")
    ids = np.fromfile(path, np.uint16)
    ids[300] += 1
    ids.tofile(path)
    record = path.with_name("tokens.json")
    record.write_text(record.read_text())
    status, _, err = script(inspect, *words)
    assert status == 2
    assert "train_000.bin" in err
    assert "checksum" in err


@pytest.mark.parametrize(
    ("module", "given", "message"),
    [
        (prepare, ["data=tinystorys"], "data=tinystorys is not an option of data; near names: tinystories"),
        (prepare, ["data.pth=a"], "there is no key 'data.pth'; near names: data.path"),
        (prepare, ["--data=text"], "options are written key=value"),
        (prepare, ["data=text"], r"data=text needs data.path=FILE"),
        (prepare, ["data=tinystories", "data.stream=true"], "data.stream=true needs no preparation"),
        (prepare, ["data=bin"], "data=bin needs no preparation"),
        (inspect, ["data=bin"], "data=bin needs data.path=FOLDER"),
        (inspect, ["data=tinystories", "data.stream=true"], "keeps no tokens to look at"),
        (prepare, ["data=hub"], "data=hub needs data.name=OWNER/NAME"),
    ],
)
def test_mistakes_are_named(script, module, given, message, monkeypatch, tmp_path):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    status, _, err = script(module, *given)
    assert (status, err.count("\n")) == (2, 1)
    assert message in err


def test_help_is_the_first_words(script):
    assert script(prepare, "--help")[1].startswith("Tokenises a data set")


@pytest.mark.seconds(20)
@pytest.mark.usefixtures("gpt2_vocabulary")
def test_a_killed_preparation_ends_with_the_same_bytes(tmp_path):
    command = [sys.executable, "-m", "scripts.bench_prepare", "megabytes=40", "kills=3", f"to={tmp_path}/prepare.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith("the same")
    assert [row["bytes"] for row in read(tmp_path / "prepare.json")] == ["-", "-", "the same"]
