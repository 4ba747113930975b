"""Token files as one array: their borders, formats, sizes, and what they cost."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data import tokens
from data.config import DataConfig, Source, Tokenizer
from data.loader import TrainBatches
from data.shards import ShardFile, Shards, foreign_shard
from data.tokens import open_tokens
from errors import UserError
from tests.conftest import ROOT


def files_of(folder: Path, lengths: list[int], dtype=np.uint16) -> list[ShardFile]:
    """Files of such lengths, whose ids count on from file to file."""
    found, at = [], 0
    for i, n in enumerate(lengths):
        path = folder / f"train_{i:03d}.bin"
        np.arange(at, at + n, dtype=dtype).tofile(path)
        found.append(ShardFile(path, np.dtype(dtype), n))
        at += n
    return found


@pytest.mark.parametrize("lengths", [[100], [1] * 30, [7, 0, 1, 50, 3], [5, 95]])
def test_blocks_reach_over_the_borders_of_files(tmp_path, lengths):
    whole = np.arange(sum(lengths))
    joined = Shards(files_of(tmp_path, lengths))
    assert len(joined) == len(whole)
    for length in (1, 8, len(whole)):
        starts = np.arange(len(whole) - length + 1)
        np.testing.assert_array_equal(joined.take(starts, length), whole[starts[:, None] + np.arange(length)])
    np.testing.assert_array_equal(np.concatenate(list(joined.chunks(7))), whole)


@pytest.mark.parametrize("rest", [0, 1, 15])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_block_once_an_epoch_over_all_files_and_processes(tmp_path, rest, size):
    """Shards of k B T + r tokens: no short batch, and no token but those at the ends is left out (llm.c, PR 494)."""
    T, B = 4, 4
    joined = Shards(files_of(tmp_path, [3 * B * T + rest, 2 * B * T + rest, rest]))
    batches = TrainBatches(joined, block_size=T, batch_size=B, seed=0)
    n_steps = -(-batches.n_blocks // B)
    rows = [batches(step, rank, size)[0] for step in range(n_steps) for rank in range(size)]
    assert all(row.shape == (B // size, T) for row in rows)
    seen = np.concatenate(rows)[: batches.n_blocks]
    assert len(np.unique(seen)) == batches.n_blocks * T
    assert len(joined) - seen.size <= 2 * T
    alone = np.concatenate([batches(step)[0] for step in range(n_steps)])
    np.testing.assert_array_equal(np.concatenate(rows), alone)


def test_an_id_beyond_the_vocabulary_is_named_with_its_place(tmp_path):
    joined = Shards(files_of(tmp_path, [10, 20]), vocab_size=25)
    joined.take(np.array([0]), 25)
    with pytest.raises(UserError, match=r"train_001\.bin, token 15 is id 25, but the vocabulary has 25"):
        joined.take(np.array([20, 0]), 6)


def header(magic: int, version: int, count: int) -> bytes:
    return np.array([magic, version, count] + [0] * 253, np.int32).tobytes()


FORMATS = {
    "nanoGPT": (b"", np.uint16),
    "llm.c": (header(20240520, 1, 1000), np.uint16),
    "llm.c, Llama 3": (header(20240801, 7, 1000), np.uint32),
}


@pytest.mark.parametrize(("head", "dtype"), FORMATS.values(), ids=FORMATS)
def test_formats_of_others_are_read(tmp_path, head, dtype):
    (tmp_path / "a.bin").write_bytes(head + np.arange(1000, dtype=dtype).tobytes())
    shard = foreign_shard(tmp_path / "a.bin", 50_257)
    np.testing.assert_array_equal(shard.map(), np.arange(1000))


BAD = {
    "odd": (b"abc", "3 bytes, which is no number of uint16"),
    "cut off": (
        header(20240520, 1, 1000) + bytes(1998),
        r"has 3,022 bytes, and its header speaks of 1,000 tokens.*3,024",
    ),
    "version": (header(20240520, 2, 0), "version 2, and only version 1 is known"),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
def test_damaged_files_of_others_are_refused(tmp_path, content, message):
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(UserError, match=message):
        foreign_shard(tmp_path / "a.bin", 50_257)


@pytest.fixture
def folder(tmp_path) -> Path:
    rng = np.random.default_rng(0)
    for name, n in {
        "fineweb_train_000001.bin": 500,
        "fineweb_train_000002.bin": 300,
        "fineweb_val_000000.bin": 200,
    }.items():
        (tmp_path / name).write_bytes(header(20240520, 1, n) + rng.integers(0, 256, n, np.uint16).tobytes())
    return tmp_path


def opened(path: Path, kind=Tokenizer.bytes):
    return open_tokens(DataConfig(source=Source.bin, path=str(path), tokenizer=kind))


def test_a_folder_of_others_is_opened_by_its_names(folder):
    data = opened(folder)
    assert (len(data.train), len(data.val), data.vocab_size) == (800, 200, 257)
    assert opened(folder).record == data.record
    globbed = open_tokens(DataConfig(source=Source.bin, path=str(folder / "fineweb_*.bin")))
    assert globbed.record["corpus_sha256"] == data.record["corpus_sha256"]


def test_files_that_do_not_fit_are_refused_before_training(folder):
    with pytest.raises(UserError, match=r"no \.bin file with train or val in its name, seen from .*; found: none"):
        opened(folder / "nothing")
    with pytest.raises(UserError, match=r"data\.tokenizer=char needs a folder with tokens\.json"):
        opened(folder, Tokenizer.char)
    (folder / "fineweb_val_000000.bin").write_bytes(header(20240520, 1, 2) + np.array([1, 257], np.uint16).tobytes())
    with pytest.raises(UserError, match=r"fineweb_val_000000\.bin, token 1 is id 257, but the vocabulary has 257"):
        opened(folder)
    (folder / "fineweb_val_000000.bin").write_bytes(header(20240801, 7, 2) + bytes(8))
    with pytest.raises(UserError, match="mixes files of uint16 and uint32"):
        opened(folder)


def test_a_prepared_folder_is_opened_with_its_own_tokenizer_alone(tmp_path, text_file):
    made = open_tokens(
        DataConfig(source=Source.text, path=str(text_file), tokenizer=Tokenizer.char, cache_dir=str(tmp_path / "c"))
    )
    (path,) = (tmp_path / "c").iterdir()
    assert len(opened(path, Tokenizer.char).train) == len(made.train)
    with pytest.raises(UserError, match=r"holds tokens of char; data\.tokenizer=char takes them"):
        opened(path, Tokenizer.bytes)


FLAT = """
import resource, sys, time
import numpy as np
from data.config import DataConfig
from data.loader import TrainBatches
from data.tokens import open_tokens

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20

before, began = resident(), time.perf_counter()
data = open_tokens(DataConfig(source="bin", path=sys.argv[1], tokenizer="bytes"))
batches = TrainBatches(data.train, block_size=1024, batch_size=16, seed=0)
batches(0)
seconds, most = time.perf_counter() - began, 0
for step in range(1, 400):
    batches(step)
    most = max(most, resident() - before)
for n, ids in enumerate(data.train.chunks()):
    most = max(most, resident() - before)
    if n == 500:
        break
print(len(data.train), seconds, most)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_file_of_20_gb_is_opened_at_once_and_memory_stays_flat(tmp_path):
    with open(tmp_path / "train.bin", "wb") as file:
        file.truncate(20 * 10**9)  # sparse
    (tmp_path / "val.bin").write_bytes(bytes(10_000))
    done = subprocess.run(
        [sys.executable, "-c", FLAT, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    count, seconds, mib = map(float, done.stdout.split())
    assert count == 10**10
    assert seconds < 2
    assert mib < 150  # 6400 blocks of 2 KiB lie in as many places; mapped with their neighbours they would be 400


def test_thousands_of_files_are_opened_in_no_time(tmp_path):
    for i in range(1000):
        with open(tmp_path / f"train_{i:06d}.bin", "wb") as file:
            file.write(header(20240520, 1, 10**8))
            file.truncate(1024 + 2 * 10**8)
    (tmp_path / "val.bin").write_bytes(bytes(10_000))
    began = time.perf_counter()
    data = opened(tmp_path)
    seconds = time.perf_counter() - began
    assert len(data.train) == 10**11
    assert seconds < 2
    assert not data.train.maps
    data.train.take(np.array([10**11 - 10]), 10)
    assert len(data.train.maps) == 1


def test_headerless_files_are_of_the_vocabularys_type(tmp_path):
    np.arange(1, 1001, dtype=np.uint32).tofile(tmp_path / "a.bin")
    np.testing.assert_array_equal(foreign_shard(tmp_path / "a.bin", 200_019).map(), np.arange(1, 1001))
    with pytest.raises(UserError, match="looks as if its ids were uint32, and those of 50257 words are uint16"):
        foreign_shard(tmp_path / "a.bin", 50_257)


DESCRIPTORS = """
import resource, sys
import numpy as np
from data.shards import ShardFile, Shards
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
files = [ShardFile(path, np.dtype(np.uint16), 10) for path in sorted(Path(sys.argv[1]).glob("*.bin"))]
tokens = Shards(files)
for start in list(range(0, len(tokens) - 15, 10)) * 2:
    assert tokens.take(np.array([start]), 15)[0].tolist() == [i % 1000 for i in range(start, start + 15)]
print(len(files))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits descriptors")
def test_more_files_than_descriptors(tmp_path):
    for i in range(300):
        (np.arange(i * 10, i * 10 + 10) % 1000).astype(np.uint16).tofile(tmp_path / f"{i:03}.bin")
    command = [sys.executable, "-c", DESCRIPTORS, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "300\n", done.stderr


@pytest.mark.parametrize("name", ["a_train_val.bin", "validation_of_train.bin"])
def test_a_name_of_both_splits_is_refused(folder, name):
    (folder / name).write_bytes(bytes(100))
    with pytest.raises(UserError, match="is named after both splits"):
        opened(folder)


def test_a_name_that_holds_a_splits_letters_is_no_split(folder):
    (folder / "retrieval.bin").write_bytes(bytes(100))
    (folder / "trained.bin").write_bytes(bytes(100))
    assert (len(opened(folder).train), len(opened(folder).val)) == (800, 200)


def test_changed_ids_are_another_text(folder):
    before = opened(folder).record["corpus_sha256"]
    path = folder / "fineweb_train_000002.bin"
    raw = bytearray(path.read_bytes())
    raw[1224] ^= 1
    path.write_bytes(raw)
    assert opened(folder).record["corpus_sha256"] != before


def test_a_glob_over_a_prepared_folder_points_to_it(tmp_path, text_file):
    open_tokens(DataConfig(source=Source.text, path=str(text_file), cache_dir=str(tmp_path / "c")))
    (path,) = (tmp_path / "c").iterdir()
    with pytest.raises(UserError, match=r"leaves out tokens\.json, which says what the ids are; give "):
        opened(path / "*.bin")


def test_small_files_are_read_whole_when_they_are_opened(folder, monkeypatch):
    monkeypatch.setattr(tokens, "CHECKED_WHOLE", 0)
    (folder / "fineweb_val_000000.bin").write_bytes(header(20240520, 1, 2) + np.array([1, 300], np.uint16).tobytes())
    data = opened(folder)  # a large one is checked where it is read
    with pytest.raises(UserError, match="is id 300"):
        data.val.take(np.array([0]), 2)
