"""Streams: exact after a stop, the same for any number of processes, disjoint, and apart from what validates."""

import json
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.config import DataConfig, Source
from data.rows import validates
from data.stream import StreamBatches
from data.tokens import open_tokens
from errors import UserError

T, B = 16, 4


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "huggingface")


def documents(n: int) -> list[str]:
    return [f"<{i}>" + "word " * (i * 7 % 23) for i in range(n)]


@pytest.fixture(params=[("parquet", 1), ("parquet", 4), ("json", 3)], ids=["parquet-1", "parquet-4", "json-3"])
def folder(request, tmp_path) -> Path:
    """300 documents, among them empty ones, in one file or several."""
    kind, n_files = request.param
    docs = documents(300)
    docs[5], docs[299] = "", None
    folder = tmp_path / "set"
    folder.mkdir()
    for i, part in enumerate(np.array_split(np.array(docs, object), n_files)):
        path = folder / f"train-{i:05d}-of-{n_files:05d}.{kind}"
        if kind == "parquet":
            pq.write_table(pa.table({"text": part.tolist()}), path)
        else:
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in part.tolist()))
    return folder


def batches(folder: Path, parts: int = 1, **more) -> StreamBatches:
    cfg = DataConfig(source=Source.hub, name=str(folder), stream=True, parts=parts, **more)
    data = open_tokens(cfg, val_tokens=200)
    return StreamBatches(data.train, block_size=T, batch_size=B, seed=0)


def ids_of(xs: list[np.ndarray], parts: int = 1) -> list[list[int]]:
    """What each part gave, end to end."""
    rows = B // parts
    return [np.concatenate([x[part * rows : (part + 1) * rows].ravel() for x in xs]).tolist() for part in range(parts)]


def test_documents_come_in_their_order_and_once(folder):
    stream = batches(folder)
    n = sum(1 + len(text) for text in documents(300)) // (B * T) + 10  # more than once through
    steps = [stream(step) for step in range(n)]
    for x, y in steps:
        assert x.shape == y.shape == (B, T)
        np.testing.assert_array_equal(x[:, 1:], y[:, :-1])
    (ids,) = ids_of([x for x, _ in steps])
    trained = [text for i, text in enumerate(documents(300)) if i not in (5, 299) and not validates(text, 10)]
    expected = [i for text in trained for i in (256, *text.encode())]
    assert ids[: len(expected)] == expected
    assert ids[len(expected) :] == expected[: len(ids) - len(expected)]


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_stop_anywhere_neither_repeats_nor_skips(folder, parts):
    whole = batches(folder, parts)
    expected, positions = [], []
    for step in range(90):
        expected.append(whole(step))
        positions.append(json.loads(json.dumps(whole.position(step))))
    for step in (0, 1, 7, 30, 60, 88):
        again = batches(folder, parts)
        again.go_to(step, positions[step])
        for later in range(step, 90):
            for ours, theirs in zip(again(later), expected[later], strict=True):
                np.testing.assert_array_equal(ours, theirs)
            assert [p["used"] for p in again.position(later)] == [p["used"] for p in positions[later]]


def test_a_second_stop_is_as_exact(folder):
    whole = batches(folder, 2)
    expected = [whole(step)[0] for step in range(60)]
    position, got = [], []
    for begin, end in ((0, 13), (13, 14), (14, 41), (41, 60)):
        again = batches(folder, 2)
        again.go_to(begin, position)
        got += [again(step)[0] for step in range(begin, end)]
        position = json.loads(json.dumps(again.position(end)))
    np.testing.assert_array_equal(np.concatenate(got), np.concatenate(expected))


@pytest.mark.parametrize("size", [2, 4])
def test_any_number_of_processes_takes_the_same_batches(folder, size):
    alone, ranks = batches(folder, 4), [batches(folder, 4) for _ in range(size)]
    for step in range(40):
        together = np.concatenate([ranks[rank](step, rank, size)[0] for rank in range(size)])
        np.testing.assert_array_equal(together, alone(step)[0])


def test_a_position_of_many_processes_is_one_for_any_number(folder):
    ranks, alone = [batches(folder, 2) for _ in range(2)], batches(folder, 2)
    for step in range(20):
        expected = alone(step)[0]
        for rank in range(2):
            ranks[rank](step, rank, 2)
    merged = [position for rank in range(2) for position in ranks[rank].position(20)]
    assert merged == alone.position(20)
    again = batches(folder, 2)
    again.go_to(20, merged)
    np.testing.assert_array_equal(again(20)[0], alone(20)[0])
    assert not np.array_equal(expected, alone(20)[0])


def test_processes_see_disjoint_documents_and_all_of_them(folder):
    stream = batches(folder, 2)
    xs = [stream(step)[0] for step in range(sum(2 + len(text) for text in documents(300)) // (B * T))]
    found = [set(text(ids)) for ids in ids_of(xs, 2)]
    assert not found[0] & found[1]
    missing = {t for t in documents(300) if not validates(t, 10)} - found[0] - found[1]
    assert missing <= {documents(300)[5], documents(300)[299]}


def text(ids: list[int]) -> list[str]:
    """The whole documents among ids."""
    return [part.decode() for part in bytes(min(i, 255) for i in ids).split(b"\xff")[1:-1]]


def test_what_validates_is_never_trained_on(folder):
    cfg = DataConfig(source=Source.hub, name=str(folder), stream=True)
    data = open_tokens(cfg, val_tokens=10_000)
    val = set(text([*data.val.take(np.array([0]), len(data.val))[0].tolist(), 256]))
    assert val == {t for i, t in enumerate(documents(300)) if validates(t, 10) and i not in (5, 299)}
    stream = StreamBatches(data.train, block_size=T, batch_size=B, seed=0)
    (ids,) = ids_of([stream(step)[0] for step in range(80)])
    assert not val & set(text(ids))


def test_the_prepared_split_is_the_streamed_one(folder, tmp_path):
    cfg = DataConfig(source=Source.hub, name=str(folder), cache_dir=str(tmp_path / "tokens"))
    prepared = open_tokens(cfg)
    streamed = open_tokens(DataConfig(source=Source.hub, name=str(folder), stream=True), val_tokens=10**6)
    for tokens in (prepared.val, streamed.val):
        assert len(tokens) == len(prepared.val)
    np.testing.assert_array_equal(*(d.val.take(np.array([0]), len(d.val)) for d in (prepared, streamed)))


def test_as_much_validates_as_is_asked_for(folder):
    cfg = DataConfig(source=Source.hub, name=str(folder), stream=True)
    assert 200 <= len(open_tokens(cfg, val_tokens=200).val) < 400
    with pytest.raises(UserError, match=r"train\.eval_tokens=null takes the whole"):
        open_tokens(cfg, val_tokens=None)


def test_a_share_without_documents_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    docs = [t for t in documents(100) if validates(t, 2)][:5]
    pq.write_table(pa.table({"text": docs}), tmp_path / "a/train-00000-of-00001.parquet")
    stream = batches(tmp_path / "a", 2, val_fraction=0.5)
    with pytest.raises(UserError, match=r"share 1 of 2 of .* has no document to train on; take fewer"):
        stream(0)


def test_another_number_of_parts_is_refused(folder):
    stream = batches(folder, 2)
    stream(0)
    with pytest.raises(UserError, match=r"data\.parts=2, and keeps them"):
        batches(folder, 4).go_to(1, stream.position(1))


def test_short_documents_cost_no_more_than_their_number(tmp_path):
    (tmp_path / "a").mkdir()
    pq.write_table(pa.table({"text": ["word"] * 20_000}), tmp_path / "a/train-00000-of-00001.parquet")
    cfg = DataConfig(source=Source.hub, name=str(tmp_path / "a"), stream=True, val_split="train")
    data, seconds = open_tokens(cfg, val_tokens=200), []
    for n_rows in (1, 4):
        tries = []
        for _ in range(3):  # the best of them: another process may have the core
            stream = StreamBatches(data.train, block_size=10_000, batch_size=n_rows, seed=0)
            began = time.perf_counter()
            stream(0)
            tries.append(time.perf_counter() - began)
        seconds.append(min(tries))
    assert seconds[1] < 8 * seconds[0]


def test_the_first_rows_may_be_empty(tmp_path):
    (tmp_path / "a").mkdir()
    docs = pa.array([None, None, *documents(50)], pa.string())
    pq.write_table(pa.table({"text": docs}), tmp_path / "a/train-00000-of-00001.parquet")
    assert batches(tmp_path / "a", val_fraction=0.5)(0)[0].shape == (B, T)


def test_a_stream_goes_from_step_to_step(folder):
    stream = batches(folder)
    first = stream(0)
    assert stream(0) is first  # as a trial, which is followed by training, may ask
    stream(1)
    with pytest.raises(AssertionError, match="2 is next, not 5"):
        stream(5)
