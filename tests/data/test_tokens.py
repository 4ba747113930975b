import builtins
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import requests
import tiktoken

import files
from data import prepare, tokens
from data.config import DataConfig, Source, Tokenizer
from data.shards import Shards
from data.tokens import open_tokens
from errors import UserError

TEXT = "the quick brown fox jumps over the lazy dog, naïve café\n" * 40


@pytest.fixture
def cfg(tmp_path) -> DataConfig:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    return DataConfig(source=Source.text, path=str(tmp_path / "a.txt"), cache_dir=str(tmp_path / "cache"))


def quiet(line: str) -> None:
    pass


def ids(tokens: Shards) -> list[int]:
    return tokens.take(np.array([0]), len(tokens))[0].tolist()


def only_folder(cfg: DataConfig) -> Path:
    (folder,) = Path(cfg.cache_dir).iterdir()
    return folder


@pytest.mark.parametrize("kind", [Tokenizer.bytes, Tokenizer.char])
def test_tokens_decode_to_the_text(cfg, kind):
    cfg.tokenizer = kind
    data = open_tokens(cfg, quiet)
    cut = int(len(TEXT) * 0.9)
    assert data.encoding.decode(ids(data.train)) == TEXT[:cut]
    assert data.encoding.decode(ids(data.val)) == TEXT[cut:]
    assert data.vocab_size == data.encoding.n_vocab == len(data.token_bytes)
    assert data.record["characters"] == {"train": cut, "val": len(TEXT) - cut}
    assert data.record["bytes"]["val"] == len(TEXT[cut:].encode()) == data.token_bytes[ids(data.val)].sum()
    assert data.record["tokens"] == {"train": len(data.train), "val": len(data.val)}


def test_opened_tokens_are_read_only(cfg):
    data = open_tokens(cfg, quiet)
    data.train.take(np.array([0]), 1)
    (array,) = data.train.maps.values()
    assert isinstance(array, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_tinyshakespeare_has_nanogpts_numbers(tmp_path, tinyshakespeare):
    cfg = DataConfig(Source.text, str(tinyshakespeare), tokenizer=Tokenizer.char, cache_dir=str(tmp_path))
    data = open_tokens(cfg, quiet)
    assert (data.vocab_size, len(data.train), len(data.val)) == (65, 1_003_854, 111_540)
    # nanoGPT's stoi of "First Citizen"
    assert data.train.take(np.array([0]), 13)[0].tolist() == [18, 47, 56, 57, 58, 1, 15, 47, 58, 47, 64, 43, 52]


@pytest.mark.usefixtures("gpt2_vocabulary")
def test_tinyshakespeare_has_nanogpts_numbers_in_gpt2_tokens(tmp_path, tinyshakespeare):
    cfg = DataConfig(Source.text, str(tinyshakespeare), tokenizer=Tokenizer.gpt2, cache_dir=str(tmp_path))
    data = open_tokens(cfg, quiet)
    assert (data.vocab_size, len(data.train), len(data.val)) == (50_257, 301_966, 36_059)
    text, cut = tinyshakespeare.read_text(), 1_003_854
    expected = tiktoken.get_encoding("gpt2").encode_ordinary
    assert ids(data.train) == expected(text[:cut])
    assert ids(data.val) == expected(text[cut:])
    assert len(expected(text)) == 338_025


def test_stdlib_is_said_once_and_then_reused(tmp_path, monkeypatch):
    cfg, said = DataConfig(cache_dir=str(tmp_path)), []
    first = open_tokens(cfg, said.append)
    (line,) = said
    assert line.startswith(f"prepared {(len(first.train) + len(first.val)) / 1e6:.1f} M tokens (bytes) from stdlib")
    assert line.endswith(f"-> {only_folder(cfg)}")
    monkeypatch.setattr(prepare, "encode", None)
    second = open_tokens(cfg, said.append)
    assert len(said) == 1
    assert ids(first.val) == ids(second.val)


def test_reopening_text_does_not_load_datasets(cfg, monkeypatch):
    open_tokens(cfg, quiet)
    monkeypatch.setitem(sys.modules, "datasets", None)
    open_tokens(cfg, quiet)


def test_content_split_and_tokenizer_each_have_their_own_cache(cfg):
    open_tokens(cfg, quiet)
    cfg.tokenizer = Tokenizer.char
    open_tokens(cfg, quiet)
    cfg.val_fraction = 0.2
    open_tokens(cfg, quiet)
    Path(cfg.path).write_text(TEXT.upper(), encoding="utf-8")
    upper = open_tokens(cfg, quiet)
    assert "Q" in upper.record["tokenizer"]["characters"]
    assert len(list(Path(cfg.cache_dir).iterdir())) == 4


def test_the_same_content_elsewhere_is_the_same_cache(cfg, tmp_path):
    open_tokens(cfg, quiet)
    shutil.move(cfg.path, tmp_path / "b.txt")
    cfg.path = str(tmp_path / "b.txt")
    open_tokens(cfg, pytest.fail)


def test_leftovers_of_a_killed_writer_are_not_read(cfg):
    expected = ids(open_tokens(cfg, quiet).train)
    folder = only_folder(cfg)
    leftover = folder.with_name(f".{folder.name}.part")
    folder.rename(leftover)
    (leftover / "train_000.bin").write_bytes(b"half")
    (leftover / ".val_000.bin.123").write_bytes(b"half")
    assert ids(open_tokens(cfg, quiet).train) == expected
    assert sorted(path.name for path in only_folder(cfg).iterdir()) == ["tokens.json", "train_000.bin", "val_000.bin"]


@pytest.mark.parametrize("name", ["train_000.bin", "val_000.bin"])
def test_truncated_tokens_are_refused(cfg, name):
    open_tokens(cfg, quiet)
    path = only_folder(cfg) / name
    os.truncate(path, path.stat().st_size - 2)
    with pytest.raises(UserError, match=rf"{name} has .* bytes, not the recorded .*delete the folder"):
        open_tokens(cfg, quiet)


@pytest.mark.parametrize("whole", [True, False], ids=["small", "large"])
def test_an_exchanged_file_is_refused(cfg, monkeypatch, whole):
    """Of large files the ends are read alone."""
    open_tokens(cfg, quiet)
    path = only_folder(cfg) / "train_000.bin"
    changed = np.fromfile(path, np.uint16)
    changed[-1 if not whole else len(changed) // 2] += 1
    changed.tofile(path)
    monkeypatch.setattr(tokens, "CHECKED_WHOLE", 2**28 if whole else 0)
    with pytest.raises(
        UserError, match=r"train_000\.bin is not the file that was written, by its checksum; delete the"
    ):
        open_tokens(cfg, quiet)


def test_another_format_is_refused(cfg):
    open_tokens(cfg, quiet)
    path = only_folder(cfg) / "tokens.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    with pytest.raises(UserError, match="is of format 1, and this is 2; delete the folder"):
        open_tokens(cfg, quiet)


@pytest.mark.parametrize("change", [{"kind": "char"}, {"kind": "bpe"}, {"end_of_text": None}, {"vocab_size": 300}])
def test_a_damaged_tokenizer_is_refused(cfg, change):
    open_tokens(cfg, quiet)
    path = only_folder(cfg) / "tokens.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"tokenizer": record["tokenizer"] | change}))
    with pytest.raises(UserError, match=r"damaged|differs from the recorded one"):
        open_tokens(cfg, quiet)


def test_the_lengths_of_tokens_are_the_tokenizers(cfg):
    expected = open_tokens(cfg, quiet).token_bytes.tolist()
    path = only_folder(cfg) / "tokens.json"
    record = json.loads(path.read_text())
    assert record["token_bytes"] == expected
    path.write_text(json.dumps(record | {"token_bytes": [7] * 257}))
    assert open_tokens(cfg, quiet).token_bytes.tolist() == expected


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"tokenizer": 1}', None])
def test_a_damaged_record_is_refused(cfg, content):
    open_tokens(cfg, quiet)
    path = only_folder(cfg) / "tokens.json"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(UserError, match=r"tokens\.json .*damaged.*delete the folder"):
        open_tokens(cfg, quiet)


def test_missing_tokens_are_refused(cfg):
    open_tokens(cfg, quiet)
    (only_folder(cfg) / "val_000.bin").unlink()
    with pytest.raises(UserError, match=r"val_000\.bin.*delete the folder"):
        open_tokens(cfg, quiet)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always out of space")
@pytest.mark.parametrize("victim", ["train_000.bin", "val_000.bin", "tokens.json"])
def test_a_full_disk_is_named_and_nothing_half_written_is_read(cfg, monkeypatch, victim):
    def open_on_full_disk(path, *args, **kwargs):
        return builtins.open("/dev/full" if victim in Path(path).name else path, *args, **kwargs)

    with monkeypatch.context() as full:
        full.setattr(prepare, "open", open_on_full_disk, raising=False)
        full.setattr(files, "open", open_on_full_disk, raising=False)
        with pytest.raises(UserError, match=r"token files to .*cache: No space left on device; mend that"):
            open_tokens(cfg, quiet)
    assert not [path for path in Path(cfg.cache_dir).iterdir() if not path.name.startswith(".")]
    data = open_tokens(cfg, quiet)
    assert data.encoding.decode(ids(data.train) + ids(data.val)) == TEXT


def test_a_cache_folder_that_cannot_be_made_is_named(cfg, tmp_path):
    cfg.cache_dir = str(tmp_path / "a.txt" / "cache")
    with pytest.raises(UserError, match=r"cannot write token files to .*data\.cache_dir=FOLDER"):
        open_tokens(cfg, quiet)


def test_gpt2_offline_is_noticed_before_the_corpus_is_read(tmp_path, monkeypatch):
    def no_network(*args, **kwargs):
        raise requests.ConnectionError

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(requests, "head", no_network)
    monkeypatch.setattr(requests, "get", no_network)
    monkeypatch.setattr(tokens, "identity", lambda cfg: pytest.fail("the corpus was read first"))
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR"):
        open_tokens(DataConfig(tokenizer=Tokenizer.gpt2), quiet)


# Waits while it holds the lock until the other has come too.
COLLIDING = """
import sys, time
from pathlib import Path
from data import prepare, tokens
from data.config import DataConfig
root = Path(sys.argv[1])
fill = prepare.fill

def late(*args):
    deadline = time.monotonic() + 20
    while not (root / "waiting").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    fill(*args)

def say(line):
    if "waiting for it" in line:
        (root / "waiting").touch()
    print(line)

prepare.fill = late
data = tokens.open_tokens(DataConfig(cache_dir=str(root / "cache")), say)
print(len(data.train))
"""


def test_of_two_processes_one_prepares_and_the_other_waits(tmp_path):
    command = [sys.executable, "-c", COLLIDING, str(tmp_path)]
    both = [
        subprocess.Popen(
            command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    results = [(*process.communicate(timeout=60), process.returncode) for process in both]
    assert [(code, err) for _, err, code in results] == [(0, ""), (0, "")]
    assert len({out.splitlines()[-1] for out, _, _ in results}) == 1
    assert sorted(out.startswith("prepared") for out, _, _ in results) == [False, True]
    (folder,) = (tmp_path / "cache").iterdir()
    assert json.loads((folder / "tokens.json").read_text())["tokens"]["train"] > 1e6
