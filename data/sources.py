"""The text to train on: where it is found, what it is known by, and which part of it validates.

A corpus has an identity that can be had without reading it all as text, so that prepared tokens open quickly.
"""

import hashlib
import json
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from data.config import DataConfig, Source
from data.rows import Rows, check_column, check_split, load_builder, loading, quiet, revision_of, validating_share
from data.shards import ends_sha256
from data.text import FileText, Piece, cut, files_sha256, pieces_of, split_characters, text_files, universal_newlines
from errors import UserError

STDLIB_VAL_EVERY = 20
# Tests, and a bundled pip; msilib is installed on Windows alone.
STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "_bundled", "msilib"}
CONNECT_TIMEOUT_S = 5
PART_BYTES = 2**24
"""Bytes of text that become one token file, or more: MOST_PARTS files are enough for any corpus."""
MOST_PARTS = 1000


class Part(Protocol):
    """Some of a split's text, small enough for one process; it can be sent to another."""

    def read(self) -> Iterator[tuple[bool, str]]:
        """Whether a document begins, of those that are separated, and the text, piece by piece."""


@dataclass
class Corpus:
    name: str
    """For people: where the text came from."""
    parts: dict[str, list[Part]]
    """By split, in order; a document never straddles two splits except where `text` is cut."""
    separated: bool
    """Whether end-of-text stands before its documents."""
    revision: str | None = None


@dataclass(frozen=True)
class Texts:
    """Documents in memory."""

    documents: list[str]

    def read(self) -> Iterator[tuple[bool, str]]:
        for text in filter(None, self.documents):
            for i, piece in enumerate(cut(text)):
                yield i == 0, piece


def identity(cfg: DataConfig) -> list:
    """Plain values that are equal where the text and its splits are; raises UserError as `load_corpus` does."""
    return [str(cfg.source), *IDENTITIES[cfg.source](cfg), split_rule(cfg)]


def load_corpus(cfg: DataConfig, scratch: Path) -> Corpus:
    """Find the configured source; raises UserError for what is missing, empty, binary, not utf-8 or no text.

    What `datasets` makes of local files goes below `scratch`.
    """
    return LOADERS[cfg.source](cfg, scratch)


def split_rule(cfg: DataConfig) -> str:
    """How the source is cut into train and val, in words."""
    if cfg.source == Source.stdlib:
        return f"every {STDLIB_VAL_EVERY}th file validates"
    if cfg.source == Source.text:
        return f"the last {cfg.val_fraction!r} of the characters validates"
    if cfg.val_split:
        return f"the split {cfg.val_split} validates"
    return f"one document in {validating_share(cfg)} validates"


def digest(value) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


# stdlib


def documents_sha256(documents: Iterable[tuple[str, str]]) -> str:
    """Hash of (name, text) pairs, with the borders between them."""
    total = hashlib.sha256()
    for name, text in documents:
        total.update(hashlib.sha256(name.encode()).digest() + hashlib.sha256(text.encode()).digest())
    return total.hexdigest()


def read_stdlib() -> dict[str, str]:
    """The standard library's modules as {relative posix path: text}, in sorted order.

    Only modules that the language lists (`sys.stdlib_module_names`) are taken, and newlines are "\\n", so that the
    result depends on Python's version and neither on the platform, nor on what is installed beside it.
    """
    root = Path(sysconfig.get_path("stdlib"))
    entries = root.iterdir() if root.is_dir() else ()  # some distributions keep the library in a zip
    modules = [path for path in entries if path.stem in sys.stdlib_module_names]
    files = [path for path in modules if path.suffix == ".py"]
    files += [path for package in modules if package.is_dir() for path in package.rglob("*.py")]
    names = sorted(path.relative_to(root).as_posix() for path in files)
    texts = {name: decode_or_none(root / name) for name in names if STDLIB_LEFT_OUT.isdisjoint(name.split("/"))}
    documents = {name: text for name, text in texts.items() if text is not None}
    if len(documents) < STDLIB_VAL_EVERY:
        raise UserError(f"this Python keeps no library source in {root}; use data=text data.path=FILE instead")
    return documents


def decode_or_none(path: Path) -> str | None:
    try:
        return universal_newlines(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError:
        return None


def identify_stdlib(cfg: DataConfig) -> list:
    return [documents_sha256(read_stdlib().items()), cfg.separate]


def load_stdlib(cfg: DataConfig, scratch: Path) -> Corpus:
    documents = read_stdlib()
    texts = list(documents.values())
    val = texts[STDLIB_VAL_EVERY - 1 :: STDLIB_VAL_EVERY]
    train = [text for i, text in enumerate(texts) if i % STDLIB_VAL_EVERY != STDLIB_VAL_EVERY - 1]
    name = f"stdlib (Python {platform.python_version()}, {len(texts)} files)"
    parts = {"train": [Texts(train)], "val": [Texts(val)]}
    return Corpus(name, parts, cfg.separate)


# text


def paths_of(cfg: DataConfig) -> list[Path]:
    """The files of `data.path`, or the downloaded `data.url`."""
    if cfg.path is None and cfg.url is not None:
        return [download(cfg.url, Path(cfg.cache_dir) / "downloads")]
    return text_files(cfg)


def identify_text(cfg: DataConfig) -> list:
    # Nameless: the same text under another path is the same corpus.
    return [files_sha256(paths_of(cfg)), str(cfg.errors), cfg.separate]


def load_text(cfg: DataConfig, scratch: Path) -> Corpus:
    """Every file a document; all are joined and cut once: the first 1 - val_fraction of the characters train.

    As in nanoGPT, which reads in text mode, "\\r\\n" and "\\r" become "\\n".
    """
    name, paths = str(cfg.path or cfg.url), paths_of(cfg)
    pieces = [piece for path in paths for piece in pieces_of(path, cfg.errors)]
    train, val = split_characters(pieces, cfg.val_fraction)
    if not train or not val:
        n_chars = sum(piece.n_chars for piece in pieces)
        raise UserError(f"{name} holds {n_chars} characters, too few for two splits; give more text")
    parts = {
        split: [FileText(own, cfg.errors) for own in grouped(pieces)]
        for split, pieces in (("train", train), ("val", val))
    }
    separated = cfg.separate and sum(piece.begins for piece in pieces) > 1
    return Corpus(name, parts, separated)


def grouped(pieces: list[Piece]) -> list[list[Piece]]:
    """Pieces in lists of about PART_BYTES each."""
    size = part_bytes(sum(piece.end - piece.begin for piece in pieces))
    groups, held = [[]], 0
    for piece in pieces:
        if held >= size:
            groups.append([])
            held = 0
        groups[-1].append(piece)
        held += piece.end - piece.begin
    return groups


def part_bytes(total: int) -> int:
    return max(PART_BYTES, -(-total // MOST_PARTS))


# columns of the Hub's data sets and of files


def identify_files(cfg: DataConfig) -> list:
    return [*contents(cfg, text_files(cfg)), cfg.column, str(cfg.errors), cfg.separate]


def contents(cfg: DataConfig, files: list[Path]) -> list:
    """What the files are known by: a hash of all their bytes, or of their ends where they are streamed."""
    if cfg.stream:
        return [[file.stat().st_size, ends_sha256(file)] for file in files]
    return [files_sha256(files)]


def identify_hub(cfg: DataConfig) -> list:
    """A local folder is known by its files, a data set of the Hub by what was asked for, which needs no network."""
    folder = Path(cfg.name)
    if folder.is_dir():  # its splits are told by the files' names
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        known = [[path.relative_to(folder).as_posix() for path in files], *contents(cfg, files)]
    else:
        known = [cfg.name]
    return [*known, cfg.subset, cfg.revision, cfg.column, cfg.separate, cfg.train_split, cfg.val_split]


def load_rows(cfg: DataConfig, scratch: Path) -> Corpus:
    with loading(cfg):
        builder = load_builder(cfg, str(scratch / "arrow"))
        builder.download_and_prepare()
        splits = list(builder.info.splits)
        names = {"train": cfg.train_split, "val": cfg.val_split or cfg.train_split}
        for name in names.values():
            check_split(splits, name)
        loaded = {split: builder.as_dataset(split=name).with_format("arrow") for split, name in names.items()}
    for dataset in loaded.values():
        check_column(cfg, {name: str(getattr(kind, "dtype", kind)) for name, kind in dataset.features.items()})
    every = validating_share(cfg)
    parts = {
        split: [
            Rows(dataset, cfg.column, cfg.errors, *ends, every, validating=split == "val") for ends in ranges(dataset)
        ]
        for split, dataset in loaded.items()
    }
    return Corpus(corpus_name(cfg), parts, cfg.separate, revision_of(cfg, builder))


def corpus_name(cfg: DataConfig) -> str:
    return " ".join(filter(None, (cfg.name, cfg.subset))) or str(cfg.path)


def ranges(dataset) -> list[tuple[int, int]]:
    """Rows of about PART_BYTES each."""
    n_rows, n_bytes = len(dataset), dataset.data.nbytes
    each = max(1, int(n_rows * part_bytes(n_bytes) / max(1, n_bytes)))
    return [(at, min(at + each, n_rows)) for at in range(0, n_rows, each)]


# a file to download


def download(url: str, folder: Path) -> Path:
    """Download once into `folder`; later calls need neither the network nor `datasets`."""
    local = folder / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}-{Path(url).name}"
    if local.exists():
        return local
    instead = "fetch it by other means and give data.path=FILE, which uses a local copy"
    if not url.startswith(("https://", "http://", "hf://")):
        raise UserError(f"data.url={url} must start with https://, http:// or hf://; or {instead}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fetch(url, local)
    except ImportError as error:
        raise UserError(f"downloading {url} needs one more package: pip install aiohttp; or {instead}") from error
    except Exception as error:  # the library's own, aiohttp's, httpx's and the hub's errors have no common ancestor
        reason = error.__cause__ or error  # fsspec calls every failure a missing file
        raise UserError(f"cannot download {url} ({type(reason).__name__}: {reason}); {instead}") from error
    return local


def fetch(url: str, local: Path) -> None:
    import datasets

    with tempfile.TemporaryDirectory(dir=local.parent, prefix=".download-") as folder, quiet(datasets):
        config = datasets.DownloadConfig(cache_dir=folder, use_etag=False, max_retries=0)
        if not url.startswith((datasets.config.HF_ENDPOINT, "hf://")):
            import aiohttp

            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=60)
            config.storage_options[url.split(":")[0]] = {"client_kwargs": {"timeout": timeout}}
        # Copied, for the hub's files are links into its own cache.
        copy = shutil.copyfile(datasets.DownloadManager(download_config=config).download(url), f"{folder}/copy")
        os.replace(copy, local)


IDENTITIES = {
    Source.stdlib: identify_stdlib,
    Source.text: identify_text,
    Source.json: identify_files,
    Source.parquet: identify_files,
    Source.hub: identify_hub,
}
LOADERS = {
    Source.stdlib: load_stdlib,
    Source.text: load_text,
    Source.json: load_rows,
    Source.parquet: load_rows,
    Source.hub: load_rows,
}
