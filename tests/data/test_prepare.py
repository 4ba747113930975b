"""Token files do not depend on how many processes made them, or how often they were killed."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data import prepare, sources, text, tokens
from data.config import DataConfig, Source, Tokenizer
from data.tokenizers import build_encoding, encoding_record
from data.tokens import open_tokens
from errors import UserError
from tests.conftest import ROOT

SMALL = "from data import sources, text; sources.PART_BYTES, text.PIECE = 20_000, 2_000\n"
PREPARE = (
    SMALL
    + """
import sys, time
from pathlib import Path
from data import prepare
from data.config import DataConfig
from data.tokens import open_tokens
write = prepare.write_shard
def slowly(*args):
    time.sleep(float(sys.argv[4]))
    write(*args)
prepare.write_shard = slowly
if __name__ == "__main__":
    tokens = {"tokenizer": "bpe", "vocab_size": 500, "num_proc": int(sys.argv[3])}
    open_tokens(DataConfig(source="text", path=sys.argv[1], cache_dir=sys.argv[2], **tokens))
"""
)


@pytest.fixture
def corpus(tmp_path) -> Path:
    """About 500 KB in three files, one of them empty, which become 25 token files."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    library = Path(random.__file__).parent
    (folder / "a.txt").write_text(
        "".join((library / f"{name}.py").read_text() for name in ("argparse", "ast", "random"))
    )
    (folder / "b.txt").write_text("")
    (folder / "c.txt").write_text("".join((library / f"{name}.py").read_text() for name in ("turtle", "typing")))
    return folder


def heeding_ctrl_c() -> None:
    """Of a shell's background jobs, such as tests may be, children ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def started(corpus: Path, cache: Path, num_proc: int = 2, pause: float = 0.0) -> subprocess.Popen:
    command = [sys.executable, "-c", PREPARE, str(corpus), str(cache), str(num_proc), str(pause)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=heeding_ctrl_c,
    )  # fmt: skip


def made(cache: Path) -> dict[str, bytes]:
    (folder,) = [path for path in cache.iterdir() if not path.name.startswith(".")]
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def finished(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def test_many_processes_make_what_one_makes(tmp_path, corpus):
    for n in (1, 2, 3):
        finished(started(corpus, tmp_path / f"by{n}", n))
    one, two, three = (made(tmp_path / f"by{n}") for n in (1, 2, 3))
    assert one == two == three
    assert len(one) > 20


@pytest.mark.seconds(20)
def test_killed_at_random_moments_it_ends_with_the_same_bytes(tmp_path, corpus):
    """scripts.bench_prepare does so ten times with a gigabyte."""
    finished(started(corpus, tmp_path / "undisturbed"))
    rng = random.Random(0)
    for _ in range(6):
        process = started(corpus, tmp_path / "killed", pause=0.8)
        time.sleep(rng.uniform(0.5, 2.0))
        assert process.poll() is None
        process.kill()
        process.communicate()
    said = finished(started(corpus, tmp_path / "killed"))
    assert "going on: " in said
    assert made(tmp_path / "killed") == made(tmp_path / "undisturbed")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_stays_behind(tmp_path, corpus, number):
    process = started(corpus, tmp_path / "cache", pause=2)
    deadline = time.monotonic() + 30
    while len(session(process.pid)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(session(process.pid)) == 3
    os.kill(process.pid, number)
    deadline = time.monotonic() + 15
    while session(process.pid) and time.monotonic() < deadline:
        process.poll()
        time.sleep(0.05)
    assert session(process.pid) == []
    process.communicate()
    assert process.returncode != 0


def session(leader: int) -> list[int]:
    """Processes of the session that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, own = stat.read_text().rsplit(")", 1)[1].split()[:4]
        except OSError:
            continue
        if int(own) == leader and state != "Z":
            found.append(int(stat.parent.name))
    return found


def text_config(tmp_path, path, **more) -> DataConfig:
    return DataConfig(source=Source.text, path=str(path), cache_dir=str(tmp_path / "cache"), **more)


def test_documents_are_separated_and_empty_ones_left_out(tmp_path):
    (tmp_path / "t").mkdir()
    for name, content in {"a": "one", "b": "", "c": "two", "d": "three " * 10}.items():
        (tmp_path / "t" / name).write_text(content)
    data = open_tokens(text_config(tmp_path, tmp_path / "t"), print)
    end = data.separator
    everything = [
        *data.train.take(np.array([0]), len(data.train))[0].tolist(),
        *data.val.take(np.array([0]), len(data.val))[0].tolist(),
    ]
    assert everything == [end, *b"one", end, *b"two", end, *(b"three " * 10)]
    assert data.record["documents"] == {"train": 3, "val": 0}
    assert data.record["bytes"]["train"] + data.record["bytes"]["val"] == 66
    assert data.token_bytes[end] == 0
    together = open_tokens(text_config(tmp_path, tmp_path / "t", separate=False), print)
    assert len(together.train) + len(together.val) == 66


def test_a_text_that_changes_meanwhile_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("some text " * 50)
    whole = prepare.write_shard

    def changing(*args):
        whole(*args)
        path.write_text("other text " * 50)

    monkeypatch.setattr(prepare, "write_shard", changing)
    with pytest.raises(UserError, match="changed while it was read"):
        open_tokens(text_config(tmp_path, path), print)
    assert list((tmp_path / "cache").iterdir()) == []


def test_token_files_of_another_plan_are_not_taken_over(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("some text " * 50)
    cfg = text_config(tmp_path, path)
    expected = open_tokens(cfg, print).record
    (folder,) = (tmp_path / "cache").iterdir()
    work = folder.with_name(f".{folder.name}.part")
    folder.rename(work)
    for name in ("train_000.bin", "val_000.bin"):
        (work / name).write_bytes(b"otherwise")
        (work / f"{name}.json").write_text(json.dumps({"file": name, "tokens": 4}))
    (work / "plan.json").write_text(json.dumps(["of another version"]))
    assert open_tokens(cfg, print).record == expected


def killed(*args) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_says_what_to_do(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(sources, "PART_BYTES", 20_000)
    monkeypatch.setattr(text, "PIECE", 2_000)
    monkeypatch.setattr(prepare, "write_shard", killed)
    with pytest.raises(UserError, match=r"for want of memory perhaps; .*data\.num_proc=1 needs less"):
        open_tokens(text_config(tmp_path, corpus, num_proc=2), print)


def test_what_is_learnt_is_learnt_from_the_training_split_alone(tmp_path):
    (tmp_path / "a.txt").write_text("abab " * 90 + "cdcd " * 10)
    data = open_tokens(text_config(tmp_path, tmp_path / "a.txt", tokenizer=Tokenizer.bpe, vocab_size=300), print)
    words = set(data.encoding.token_byte_values())
    assert b" abab" in words
    assert b"cd" not in words


def test_what_was_learnt_from_another_revision_is_not_taken_over(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("some text " * 50)
    cfg = text_config(tmp_path, path, tokenizer=Tokenizer.char)
    expected = open_tokens(cfg, print).record
    (folder,) = (tmp_path / "cache").iterdir()
    shutil.rmtree(folder)
    work = folder.with_name(f".{folder.name}.part")
    work.mkdir()
    (work / "plan.json").write_text(json.dumps(["another revision", 2]))
    other = encoding_record(build_encoding(Tokenizer.char, "xyz", separated=False))
    (work / "tokenizer.json").write_text(json.dumps(other))
    assert open_tokens(cfg, print).record == expected


def test_a_lock_that_was_removed_keeps_nobody_in(tmp_path):
    """The one who waited for it takes the new one, which a third may have."""
    path = tmp_path / "lock"
    code = (
        "import sys, time; from pathlib import Path; from data.prepare import locked\n"
        "with locked(Path(sys.argv[1]), lambda line: print(line, flush=True)):\n"
        "    inside = Path(sys.argv[1] + '.inside'); inside.touch(exist_ok=False)\n"
        "    print('in', flush=True); time.sleep(float(sys.argv[2])); inside.unlink(); print('out', flush=True)"
    )

    def start(seconds):
        command = [sys.executable, "-c", code, str(path), str(seconds)]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    first = start(1.0)
    assert first.stdout.readline() == "in\n"
    second = start(2.0)
    assert second.stdout.readline().startswith("another process")
    first.communicate()  # removes the lock, as the second gets it
    third = start(0.0)
    outs = [p.communicate()[0] for p in (second, third)]
    assert [p.returncode for p in (second, third)] == [0, 0]  # neither was in while the other was
    assert outs[0] == "in\nout\n"
    assert outs[1].endswith("in\nout\n")
    assert not path.exists()


def test_the_standard_library_is_joined_where_asked(tmp_path):
    data = open_tokens(DataConfig(cache_dir=str(tmp_path), separate=False), print)
    assert data.separator is None
    assert not any((ids == 256).any() for ids in data.train.chunks())


def test_a_tokenizer_has_its_own_folder_and_processes_have_not(tmp_path):
    (tmp_path / "a.txt").write_text("abab " * 100)
    folders = [
        tokens.token_folder(text_config(tmp_path, tmp_path / "a.txt", **more))
        for more in ({}, {"num_proc": 3}, {"tokenizer": Tokenizer.bpe}, {"tokenizer": Tokenizer.bpe, "vocab_size": 300})
    ]
    assert folders[0] == folders[1]
    assert len(set(folders)) == 3
