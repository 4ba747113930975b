import functools
import http.server
import sys
import threading
from pathlib import Path

import pytest

from data import sources
from data.config import DataConfig, Source
from data.sources import Corpus, identity, read_stdlib
from errors import UserError


def load_corpus(cfg: DataConfig) -> Corpus:
    return sources.load_corpus(cfg, Path(cfg.cache_dir) / "scratch")


def texts(corpus: Corpus, split: str) -> str:
    return "".join(text for part in corpus.parts[split] for _, text in part.read())


def text_config(tmp_path, path=None, **kwargs) -> DataConfig:
    return DataConfig(
        source=Source.text, path=None if path is None else str(path), cache_dir=str(tmp_path / "cache"), **kwargs
    )


def joined(corpus) -> str:
    return texts(corpus, "train") + texts(corpus, "val")


def test_stdlib_is_large_sorted_and_holds_library_modules_only():
    documents = read_stdlib()
    assert list(documents) == sorted(documents)
    assert 8e6 < sum(map(len, documents.values())) < 20e6
    assert {"argparse.py", "json/decoder.py", "asyncio/events.py"} <= documents.keys()
    parts = {part for name in documents for part in name.split("/")}
    assert parts.isdisjoint({"test", "tests", "idle_test", "_bundled", "site-packages", "dist-packages", "__pycache__"})
    assert not any(part.startswith(("_sysconfigdata", "config-")) for part in parts)


def test_stdlib_splits_by_file():
    documents, corpus = list(read_stdlib().values()), load_corpus(DataConfig())
    (train,), (val,) = corpus.parts["train"], corpus.parts["val"]
    assert val.documents == documents[19::20]
    assert sorted(train.documents + val.documents) == sorted(documents)
    assert 0.03 < sum(map(len, val.documents)) / sum(map(len, documents)) < 0.07
    assert corpus.separated
    begins = [begins for begins, _ in train.read()]
    assert sum(begins) == sum(map(bool, train.documents))


@pytest.fixture
def small_library(tmp_path, monkeypatch):
    root = tmp_path / "lib"
    for name in [f"encodings/m{i:02}.py" for i in range(25)] + ["json/tests/t.py", "site-packages/json.py"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n")
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(root))
    return root


def test_stdlib_ignores_what_the_platform_or_the_user_adds(small_library):
    before = read_stdlib()
    assert len(before) == 25
    (small_library / "sitecustomize.py").write_text("# the distribution's\n")
    (small_library / "_sysconfigdata__linux.py").write_text("# the platform's\n")
    (small_library / "encodings/latin.py").write_bytes(b"# -*- latin-1 -*- \xe9\n")
    (small_library / "encodings/m00.py").write_bytes(b"# encodings/m00.py\r\n")
    assert read_stdlib() == before


def test_stdlib_fingerprint_follows_names_and_content(small_library):
    seen = {str(identity(DataConfig()))}
    (small_library / "encodings/m00.py").write_text("# changed\n")
    seen.add(str(identity(DataConfig())))
    (small_library / "encodings/m00.py").rename(small_library / "encodings/a.py")
    seen.add(str(identity(DataConfig())))
    assert len(seen) == 3


@pytest.mark.parametrize("place", ["", "nowhere"])
def test_stdlib_without_sources_points_to_text(tmp_path, monkeypatch, place):
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(tmp_path / place))
    with pytest.raises(UserError, match=r"no library source in .*data\.path=FILE"):
        load_corpus(DataConfig())


def test_tinyshakespeare_is_cut_where_nanogpt_cuts(tmp_path, tinyshakespeare):
    corpus = load_corpus(text_config(tmp_path, tinyshakespeare))
    text = tinyshakespeare.read_text()
    assert len(text) == 1_115_394
    assert (texts(corpus, "train"), texts(corpus, "val")) == (text[:1_003_854], text[1_003_854:])
    assert len(texts(corpus, "val")) == 111_540
    assert not corpus.separated  # it is one document


def test_folder_takes_visible_files_in_sorted_order(tmp_path):
    folder = tmp_path / ".hidden above" / "texts"
    for name, content in {"b/z.md": "3", "a.txt": "1", "b/a": "2", "c.txt": "4", ".git/x": "no", ".h": "no"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content * 5)
    assert joined(load_corpus(text_config(tmp_path, folder))) == "1" * 5 + "2" * 5 + "3" * 5 + "4" * 5


def test_glob_and_literal_names_with_brackets(tmp_path):
    for name in ("a[1].txt", "a1.txt", "sub/a2.txt", "b.md"):
        (tmp_path / "t" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "t" / name).write_text(f"<{name}>")
    assert joined(load_corpus(text_config(tmp_path, tmp_path / "t/a[1].txt"))) == "<a[1].txt>"
    assert joined(load_corpus(text_config(tmp_path, tmp_path / "t/a*.txt"))) == "<a1.txt><a[1].txt>"
    everything = joined(load_corpus(text_config(tmp_path, tmp_path / "t/**/*.txt")))
    assert everything == "<a1.txt><a[1].txt><sub/a2.txt>"


def test_the_split_cuts_characters_across_documents(tmp_path):
    (tmp_path / "t").mkdir()
    for name, content in {"a": "é" * 4, "b": "", "c": "漢" * 4, "d": "x" * 12}.items():
        (tmp_path / "t" / name).write_text(content, encoding="utf-8")
    corpus = load_corpus(text_config(tmp_path, tmp_path / "t", val_fraction=0.7))
    read = {split: [piece for part in corpus.parts[split] for piece in part.read()] for split in corpus.parts}
    assert read["train"] == [(True, "é" * 4), (True, "漢" * 2)]
    assert read["val"] == [(False, "漢" * 2), (True, "x" * 12)]
    assert corpus.separated


def test_newlines_become_unix_newlines(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\n\n" * 3)
    cfg = text_config(tmp_path, tmp_path / "a.txt")
    assert joined(load_corpus(cfg)) == "one\ntwo\nthree\n\n" * 3


def test_a_changed_file_is_never_served_stale(tmp_path):
    path, cfg = tmp_path / "a.txt", text_config(tmp_path, tmp_path / "a.txt")
    path.write_text("first" * 3)
    load_corpus(cfg)
    first = identity(cfg)
    path.write_text("other" * 3)
    assert joined(load_corpus(cfg)) == "other" * 3
    assert identity(cfg) != first


BAD_FILES = {
    "empty": (b"", "0 characters, too few"),
    "one character": (b"x", "1 characters, too few"),
    "latin-1": (b"abc\xe9 def", r"a\.txt is not utf-8: byte 0xe9 at offset 3; convert it"),
    "binary": (b"\x7fELF\x00\x01", r"a\.txt is binary \(zero byte at offset 4\)"),
    "utf-16": ("text".encode("utf-16-le"), r"binary .*utf-8 text"),
}


@pytest.mark.parametrize(("content", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_files_are_refused(tmp_path, content, message):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_corpus(text_config(tmp_path, tmp_path / "a.txt"))


def test_bad_paths_are_refused(tmp_path):
    (tmp_path / "nothing").mkdir()
    for path, message in {
        "no.txt": "is no file or folder",
        "*.none": "matches no file",
        "nothing": "matches no",
    }.items():
        with pytest.raises(UserError, match=message):
            load_corpus(text_config(tmp_path, tmp_path / path))
    with pytest.raises(UserError, match=r"data=text needs data\.path=FILE"):
        identity(text_config(tmp_path))


def test_a_url_is_downloaded_once(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(sources, "fetch", lambda url, local: (calls.append(url), local.write_text("downloaded"))[0])
    cfg = text_config(tmp_path, url="https://example.org/books/in.txt")
    assert joined(load_corpus(cfg)) == joined(load_corpus(cfg)) == "downloaded"
    assert calls == ["https://example.org/books/in.txt"]


def test_a_failed_download_names_the_way_out(tmp_path, monkeypatch):
    def unreachable(url, local):
        raise FileNotFoundError(url) from ConnectionError("no route")

    monkeypatch.setattr(sources, "fetch", unreachable)
    with pytest.raises(UserError, match=r"cannot download .*ConnectionError: no route.*data\.path=FILE"):
        load_corpus(text_config(tmp_path, url="https://example.org/in.txt"))


def test_a_missing_http_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(UserError, match=r"pip install aiohttp; or .*data\.path=FILE"):
        load_corpus(text_config(tmp_path, url="https://example.org/in.txt"))


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_url_never_touches_a_local_file(tmp_path, scheme):
    (tmp_path / "mine.txt").write_text("precious" * 3)
    with pytest.raises(UserError, match=r"must start with https://.*data\.path=FILE"):
        load_corpus(text_config(tmp_path, url=f"{scheme}{tmp_path}/mine.txt"))
    assert (tmp_path / "mine.txt").exists()


@pytest.fixture
def local_server(tmp_path):
    (tmp_path / "served").mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Handler, directory=str(tmp_path / "served"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield tmp_path / "served", f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_download_through_datasets(tmp_path, local_server, capfd):
    pytest.importorskip("aiohttp", reason="datasets downloads over http with aiohttp, which is not installed")
    folder, address = local_server
    (folder / "in.txt").write_bytes("naïve café\n".encode() * 30)
    cfg = text_config(tmp_path, url=f"{address}/in.txt")
    assert joined(load_corpus(cfg)) == "naïve café\n" * 30
    (folder / "in.txt").unlink()
    assert joined(load_corpus(cfg)) == "naïve café\n" * 30
    assert [path.name.split("-")[1] for path in (tmp_path / "cache/downloads").iterdir()] == ["in.txt"]
    with pytest.raises(UserError, match=r"cannot download .*none\.txt \(ClientResponseError: 404"):
        load_corpus(text_config(tmp_path, url=f"{address}/none.txt"))
    assert capfd.readouterr() == ("", "")
