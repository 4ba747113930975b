"""Columns of data sets: the Hub's, by local folders of their form, and json and parquet files."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests

from configs.twin import composed
from data import rows, sources
from data.config import DataConfig, Source, Tokenizer
from data.rows import validates
from data.tokens import open_tokens
from errors import UserError
from tests.conftest import ROOT

RECORDED = json.loads((ROOT / "tests/data/hub_sets.json").read_text())
VALUES = {"string": "text", "double": 0.5, "int64": 3}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "huggingface")


def documents(n: int) -> list[str]:
    return [f"document {i}: " + "word " * (i % 37) for i in range(n)]


def write_parquet(path: Path, columns: dict[str, list]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def texts(data, split: str) -> list[str]:
    """The documents of a split."""
    tokens = getattr(data, split)
    ids = tokens.take(np.array([0]), len(tokens))[0]
    pieces = np.split(ids, np.flatnonzero(ids == data.separator))
    return [data.encoding.decode(piece[1:].tolist()) for piece in pieces if len(piece) > 1]


@pytest.mark.parametrize("name", RECORDED)
def test_the_named_sets_are_read_by_their_recorded_columns_and_splits(tmp_path, name):
    """A folder with the columns, types and splits of the set on the Hub, in place of it."""
    recorded = RECORDED[name]
    cfg = composed(f"data={name}", "data.tokenizer=bytes").data
    assert (cfg.name, cfg.subset) == (recorded["name"], recorded["subset"])
    assert {cfg.train_split, cfg.val_split} - {None} <= recorded["splits"].keys()
    for split in recorded["splits"]:
        columns = {column: [VALUES[kind]] * 3000 for column, kind in recorded["columns"].items()}
        columns["text"] = [f"{split} {i}\n" for i in range(3000)]
        write_parquet(tmp_path / "set" / f"{split}-00000-of-00001.parquet", columns)
    local = replace(cfg, name=str(tmp_path / "set"), subset=None, revision=None, cache_dir=str(tmp_path / "tokens"))
    data = open_tokens(local, print)
    train, val = ("".join(texts(data, split)) if cfg.separate else whole(data, split) for split in ("train", "val"))
    if cfg.val_split:
        assert train == "".join(f"train {i}\n" for i in range(3000))
        assert val == "".join(f"validation {i}\n" for i in range(3000))
    else:
        assert sorted((train + val).splitlines()) == sorted(f"train {i}" for i in range(3000))
        assert 0 < val.count("\n") < 30
    ends = sum(int((ids == data.separator).sum()) for ids in data.train.chunks())
    assert ends == (data.record["documents"]["train"] if cfg.separate else 0)


def whole(data, split: str) -> str:
    tokens = getattr(data, split)
    return data.encoding.decode(tokens.take(np.array([0]), len(tokens))[0].tolist())


def files_config(tmp_path, source: Source, path: Path, **more) -> DataConfig:
    return DataConfig(source=source, path=str(path), cache_dir=str(tmp_path / "tokens"), **more)


@pytest.fixture(params=["json", "parquet"])
def column(request, tmp_path) -> DataConfig:
    """500 documents in the column `story` of two files."""
    docs = documents(500)
    for n, part in enumerate((docs[:300], docs[300:])):
        path = tmp_path / "files" / f"{n}.{request.param}"
        if request.param == "parquet":
            write_parquet(path, {"story": part, "n": list(range(len(part)))})
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(json.dumps({"story": text, "n": i}) + "\n" for i, text in enumerate(part)))
    return files_config(tmp_path, Source(request.param), tmp_path / "files", column="story")


def test_a_column_of_files_is_split_by_its_documents(column):
    data = open_tokens(column, print)
    train, val = texts(data, "train"), texts(data, "val")
    assert sorted(train + val) == sorted(documents(500))
    assert val == [text for text in documents(500) if validates(text, 10)]
    assert 25 < len(val) < 75
    assert data.record["split_rule"] == "one document in 10 validates"


def test_a_changed_file_is_never_served_stale(column):
    open_tokens(column, print)
    path = Path(column.path) / f"1.{column.source}"
    if column.source == Source.parquet:
        write_parquet(path, {"story": ["changed"] * 200, "n": list(range(200))})
    else:
        path.write_text(json.dumps({"story": "changed", "n": 0}) + "\n")
    data = open_tokens(column, print)
    assert "changed" in texts(data, "train") + texts(data, "val")


def test_a_column_that_is_missing_or_no_text_is_refused(column):
    with pytest.raises(UserError, match=r"there is no column 'text'; data\.column= takes one of story, n"):
        open_tokens(replace(column, column="text"), print)
    with pytest.raises(UserError, match=r"the column 'n' holds int64, not text; columns of text are: story"):
        open_tokens(replace(column, column="n"), print)
    assert not list(Path(column.cache_dir).glob("[!.]*"))


@pytest.mark.parametrize("values", [[["a"], ["b"]], [{"a": "b"}] * 2])
@pytest.mark.parametrize("stream", [False, True])
def test_columns_of_lists_or_structs_are_no_text(tmp_path, values, stream):
    write_parquet(tmp_path / "a.parquet", {"text": values * 20})
    with pytest.raises(UserError, match=r"the column 'text' holds .*, not text"):
        open_tokens(files_config(tmp_path, Source.parquet, tmp_path / "a.parquet", stream=stream), print, val_tokens=9)


def test_bytes_that_are_no_text_are_named_with_their_row(tmp_path):
    raw = [text.encode() for text in documents(60)]
    raw[41] = b"caf\xe9"
    column = pa.Array.from_buffers(pa.string(), 60, pa.array(raw, pa.binary()).buffers())
    write_parquet(tmp_path / "a.parquet", {"text": column})
    cfg = files_config(tmp_path, Source.parquet, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"'text' is not utf-8 in row 41: byte 0xe9 at offset 3; data.errors=replace"):
        open_tokens(cfg, print)
    data = open_tokens(replace(cfg, errors="replace"), print)
    assert "caf\ufffd" in texts(data, "train") + texts(data, "val")


def test_a_file_of_another_split_is_another_text(tmp_path):
    """Of a folder that is read as a data set: names tell the splits, and the same bytes may be others'."""
    for name, n in {"train-00000": 100, "test-00000": 70}.items():
        write_parquet(tmp_path / f"set/{name}-of-00001.parquet", {"text": documents(n)})
    cfg = DataConfig(source=Source.hub, name=str(tmp_path / "set"), cache_dir=str(tmp_path / "tokens"))
    before = open_tokens(cfg, print).record["documents"]
    for i, name in enumerate(("test", "train")):  # which leaves their bytes in the same order
        (tmp_path / f"set/{name}-00000-of-00001.parquet").rename(tmp_path / f"set/train-0000{i}-of-00002.parquet")
    after = open_tokens(cfg, print).record["documents"]
    assert sum(before.values()) == 100
    assert sum(after.values()) == 170


def test_at_most_half_of_the_documents_validate():
    with pytest.raises(UserError, match=r"data\.val_fraction=0\.9 of documents must be at most 0\.5"):
        DataConfig(source=Source.json, val_fraction=0.9)


def test_rows_without_text_are_left_out(tmp_path):
    write_parquet(tmp_path / "a.parquet", {"text": ["", None, "a", "\0b", "\r\n", *documents(50)]})
    data = open_tokens(files_config(tmp_path, Source.parquet, tmp_path / "a.parquet"), print)
    assert sorted(texts(data, "train") + texts(data, "val")) == sorted(["a", "\0b", "\r\n", *documents(50)])


@pytest.mark.parametrize("docs", [["only one"], ["", None, ""], []])
def test_too_few_documents_for_two_splits_are_refused(tmp_path, docs):
    write_parquet(tmp_path / "a.parquet", {"text": pa.array(docs, pa.string())})
    with pytest.raises(UserError, match=r"raise data\.val_fraction|cannot read"):
        open_tokens(files_config(tmp_path, Source.parquet, tmp_path / "a.parquet"), print)


def test_a_name_with_brackets_is_a_name(tmp_path):
    write_parquet(tmp_path / "a[1].parquet", {"text": documents(50)})
    write_parquet(tmp_path / "a1.parquet", {"text": ["another"] * 50})
    data = open_tokens(files_config(tmp_path, Source.parquet, tmp_path / "a[1].parquet"), print)
    assert sorted(texts(data, "train") + texts(data, "val")) == sorted(documents(50))


def test_fewer_documents_than_processes(tmp_path):
    write_parquet(tmp_path / "a.parquet", {"text": documents(12)})
    cfg = files_config(tmp_path, Source.parquet, tmp_path / "a.parquet", num_proc=40, val_fraction=0.5)
    data = open_tokens(cfg, print)
    assert sorted(texts(data, "train") + texts(data, "val")) == sorted(documents(12))


def test_rows_by_many_processes_are_those_by_one(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet", {"text": documents(2000)})
    monkeypatch.setattr(sources, "PART_BYTES", 10_000)
    found = []
    for n in (1, 3):
        cfg = files_config(tmp_path, Source.parquet, tmp_path / "a.parquet", num_proc=n)
        data = open_tokens(replace(cfg, cache_dir=str(tmp_path / f"by{n}")), print)
        found.append(data.record)
    assert found[0] == found[1]
    assert len(found[0]["shards"]["train"]) > 10
    assert found[0]["documents"]["train"] + found[0]["documents"]["val"] == 2000


def test_a_long_document_is_whole(tmp_path):
    long = "a line of words, " * 1_000_000
    write_parquet(tmp_path / "a.parquet", {"text": [long, *documents(20)]})
    cfg = files_config(tmp_path, Source.parquet, tmp_path / "a.parquet", val_fraction=0.5)
    data = open_tokens(cfg, print)
    assert long in texts(data, "train") + texts(data, "val")


BAD_FILES = {
    "cut off": (b'{"text": "a"}\n{"text": "b', "cannot read data.path=.*a.json as json"),
    "latin-1": (b'{"text": "caf\xe9"}\n', "a.json is not utf-8: byte 0xe9 at offset 13"),
    "empty": (b"", "cannot read data.path=.*a.json as json"),
}


@pytest.mark.parametrize(("content", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_json_is_refused(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_tokens(files_config(tmp_path, Source.json, tmp_path / "a.json"), print)


def test_bad_bytes_of_json_are_replaced_where_asked(tmp_path):
    lines = b"".join(b'{"text": "caf\xe9 %d"}\n' % i for i in range(40))
    (tmp_path / "a.json").write_bytes(lines)
    data = open_tokens(
        files_config(tmp_path, Source.json, tmp_path / "a.json", errors="replace", val_fraction=0.5), print
    )
    assert sorted(texts(data, "train") + texts(data, "val")) == sorted(f"caf\ufffd {i}" for i in range(40))


def test_a_split_that_is_missing_is_named(tmp_path):
    write_parquet(tmp_path / "set/train-00000-of-00001.parquet", {"text": documents(30)})
    cfg = DataConfig(source=Source.hub, name=str(tmp_path / "set"), val_split="dev", cache_dir=str(tmp_path / "tokens"))
    with pytest.raises(UserError, match=r"there is no split 'dev'; .* take train"):
        open_tokens(cfg, print)


def test_without_a_network_it_is_said_at_once_and_what_would_help(tmp_path, monkeypatch):
    def away(*args, **kwargs):
        raise requests.ConnectionError

    monkeypatch.setattr(requests, "head", away)
    monkeypatch.setattr(rows, "load_builder", lambda *_: (_ for _ in ()).throw(ConnectionError("Couldn't reach it")))
    cfg = DataConfig(source=Source.hub, name="someone/something", cache_dir=str(tmp_path / "tokens"))
    monkeypatch.setattr(sources, "load_builder", rows.load_builder)
    with pytest.raises(
        UserError, match=r"cannot have data\.name=someone/something \(ConnectionError: .*data\.name=FOLDER"
    ):
        open_tokens(cfg, print)


def test_the_network_is_asked_once_and_shortly(monkeypatch):
    asked = []

    def away(url, timeout):
        asked.append((url, timeout))
        raise requests.ConnectionError

    monkeypatch.setattr(requests, "head", away)
    monkeypatch.delitem(sys.modules, "huggingface_hub", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    cfg = DataConfig(source=Source.hub, name="someone/something")
    rows.offline_at_once(cfg)
    rows.offline_at_once(cfg)
    assert asked == [("https://hub.example", rows.NETWORK_TIMEOUT_S)]
    monkeypatch.delenv("HF_HUB_OFFLINE")


@pytest.mark.parametrize("bars_were_on", [True, False])
def test_reading_leaves_no_trace(tmp_path, capfd, monkeypatch, bars_were_on):
    write_parquet(tmp_path / "a.parquet", {"text": documents(50)})
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", True)
    switch = {True: datasets.enable_progress_bars, False: datasets.disable_progress_bars}
    switch[bars_were_on]()
    try:
        open_tokens(files_config(tmp_path, Source.parquet, tmp_path / "a.parquet"), lambda line: None)
        assert datasets.are_progress_bars_disabled() is not bars_were_on
    finally:
        switch[True]()
    assert datasets.config.HF_UPDATE_DOWNLOAD_COUNTS is True
    assert capfd.readouterr() == ("", "")
    (folder,) = (tmp_path / "tokens").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["tokens.json", "train_000.bin", "val_000.bin"]


def test_a_hub_set_needs_its_name():
    with pytest.raises(UserError, match=r"data=hub needs data\.name=OWNER/NAME"):
        DataConfig(source=Source.hub)
    for option in ("name", "subset", "revision", "train_split", "val_split"):
        with pytest.raises(UserError, match=rf"data\.{option}=a needs data=hub beside it"):
            DataConfig(**{option: "a"})
    with pytest.raises(UserError, match=r"data\.tokenizer=bpe is made from the whole text"):
        DataConfig(source=Source.json, stream=True, tokenizer=Tokenizer.bpe)
