"""The text to train on: where it is found, how it is read, and which part of it validates.

A corpus has a fingerprint that can be had without preparing it, so that a cached token file opens quickly.
"""

import glob
import hashlib
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from data.config import DataConfig, Source
from errors import UserError

STDLIB_VAL_EVERY = 20
# Tests, and a bundled pip; msilib is installed on Windows alone.
STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "_bundled", "msilib"}
# Arrow's string column, in which `datasets` keeps a document, ends there.
DOCUMENT_LIMIT_BYTES = 2**31 - 1
CONNECT_TIMEOUT_S = 5


@dataclass
class Corpus:
    """Documents in order; a document never straddles the two splits except where `text` is cut."""

    name: str
    """For people: where the text came from."""
    sha256: str
    """Equal to `corpus_sha256` of the same content."""
    train: list[str]
    val: list[str]


def corpus_sha256(cfg: DataConfig) -> str:
    """Hash of the content that `load_corpus` would load now; raises UserError as it does."""
    return FINGERPRINTS[cfg.source](cfg)


def load_corpus(cfg: DataConfig) -> Corpus:
    """Read the configured source; raises UserError for what is missing, empty, binary or not utf-8."""
    return LOADERS[cfg.source](cfg)


def split_rule(cfg: DataConfig) -> str:
    """How the source is cut into train and val; part of a token file's identity."""
    if cfg.source == Source.stdlib:
        return f"every {STDLIB_VAL_EVERY}th file validates"
    return f"the last {cfg.val_fraction!r} of the characters validates"


def documents_sha256(documents: Iterable[tuple[str, str]]) -> str:
    """Hash of (name, text) pairs, with the borders between them."""
    total = hashlib.sha256()
    for name, text in documents:
        total.update(hashlib.sha256(name.encode()).digest() + hashlib.sha256(text.encode()).digest())
    return total.hexdigest()


def universal_newlines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


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


def fingerprint_stdlib(cfg: DataConfig) -> str:
    return documents_sha256(read_stdlib().items())


def load_stdlib(cfg: DataConfig) -> Corpus:
    documents = read_stdlib()
    texts = list(documents.values())
    val = texts[STDLIB_VAL_EVERY - 1 :: STDLIB_VAL_EVERY]
    train = [text for i, text in enumerate(texts) if i % STDLIB_VAL_EVERY != STDLIB_VAL_EVERY - 1]
    name = f"stdlib (Python {platform.python_version()}, {len(texts)} files)"
    return Corpus(name, documents_sha256(documents.items()), train, val)


def text_files(cfg: DataConfig) -> list[Path]:
    """The files of `data.path`, or the downloaded `data.url`, sorted by path.

    A path that exists is taken as it is, brackets and stars in its name included. A folder gives every regular file
    below it that is neither hidden nor in a hidden folder, whatever its suffix; a glob narrows that.
    """
    if cfg.path is None and cfg.url is None:
        raise UserError("data=text needs data.path=FILE, a folder, or a glob of utf-8 text")
    if cfg.path is None:
        return [download(cfg.url, Path(cfg.cache_dir) / "downloads")]
    path = Path(cfg.path).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = [p for p in path.rglob("*") if p.is_file() and not is_hidden(p.relative_to(path))]
    elif glob.has_magic(str(path)):
        found = {p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file()}
    else:
        raise UserError(f"data.path={cfg.path} is no file or folder, seen from {Path.cwd()}; correct the path")
    if not found:
        raise UserError(f"data.path={cfg.path} matches no file, seen from {Path.cwd()}; ** reaches into subfolders")
    return sorted(found)


def is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def read_utf8(path: Path) -> str:
    """The file's text with "\\n" newlines; UserError if it is binary, not utf-8, or not readable."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if len(raw) > DOCUMENT_LIMIT_BYTES:
        raise UserError(f"{path} has {len(raw):,} bytes; cut it into files below 2 GiB and give their folder")
    if b"\0" in raw:
        raise UserError(
            f"{path} is binary (zero byte at offset {raw.index(0)}); data.path takes utf-8 text, "
            "and a glob such as FOLDER/**/*.txt picks it out"
        )
    try:
        return universal_newlines(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not utf-8: byte 0x{raw[error.start]:02x} at offset {error.start}; "
            f"convert it, for example with iconv -f latin1 -t utf-8"
        ) from error


def fingerprint_text(cfg: DataConfig) -> str:
    # Nameless: the same text under another path is the same corpus.
    return documents_sha256(("", read_utf8(path)) for path in text_files(cfg))


def load_text(cfg: DataConfig) -> Corpus:
    """Every file a document, joined without separator and cut once: the first 1 - val_fraction of the characters train.

    `datasets` reads in text mode, as nanoGPT does, so "\\r\\n" and "\\r" become "\\n".
    """
    name, paths = str(cfg.path or cfg.url), text_files(cfg)
    expected = documents_sha256(("", read_utf8(path)) for path in paths)
    documents = read_documents(paths, Path(cfg.cache_dir))
    if documents_sha256(("", text) for text in documents) != expected:
        raise UserError(f"{name} changed while it was read; start again when nothing writes to it")
    train, val = split_characters(documents, cfg.val_fraction)
    if not train or not val:
        raise UserError(f"{name} holds {sum(map(len, documents))} characters, too few for two splits; give more text")
    return Corpus(name, expected, train, val)


def split_characters(documents: list[str], val_fraction: float) -> tuple[list[str], list[str]]:
    """Cut the concatenation of the documents at nanoGPT's place, int(n * (1 - val_fraction))."""
    cut = int(sum(map(len, documents)) * (1 - val_fraction))
    train, val = [], []
    for text in documents:
        train.append(text[:cut])
        val.append(text[cut:])
        cut = max(0, cut - len(text))
    return [text for text in train if text], [text for text in val if text]


def read_documents(paths: list[Path], scratch: Path) -> list[str]:
    """One string per file. The Arrow copy that `datasets` makes lives for this call only, so it is never stale."""
    import datasets

    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".arrow-") as folder, quiet(datasets):
        try:
            rows = datasets.load_dataset(
                "text",
                data_files=[glob.escape(os.path.abspath(path)) for path in paths],
                sample_by="document",
                split="train",
                cache_dir=folder,
                keep_in_memory=True,
            )
        except datasets.exceptions.DatasetGenerationError as error:
            raise (error.__cause__ or error) from None
    return list(rows["text"])


@contextmanager
def quiet(datasets) -> Iterator[None]:
    """No progress bars and no download counting (which waits on the network); both as before afterwards."""
    counting, had_bars = datasets.config.HF_UPDATE_DOWNLOAD_COUNTS, not datasets.are_progress_bars_disabled()
    asked_for_bars = datasets.config.HF_DATASETS_DISABLE_PROGRESS_BARS is False
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    if had_bars and not asked_for_bars:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = counting
        if had_bars and not asked_for_bars:
            datasets.enable_progress_bars()


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


FINGERPRINTS = {Source.stdlib: fingerprint_stdlib, Source.text: fingerprint_text}
LOADERS = {Source.stdlib: load_stdlib, Source.text: load_text}
