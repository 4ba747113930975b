"""Opened tokens: of a prepared folder, of token files made elsewhere, or of a stream.

A prepared folder lies below data.cache_dir, named after its text, split rule and tokenizer. It holds train_000.bin and
so on, val_000.bin and so on (bare ids, in the recorded dtype), and tokens.json.
"""

import glob
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data.config import FROM_CORPUS, DataConfig, Source
from data.prepare import FORMAT, RECORD_NAME, cache_key, prepare
from data.shards import CHECKED_WHOLE, ShardFile, Shards, ends_sha256, foreign_shard, whole_sha256
from data.sources import digest, identity
from data.stream import Stream, open_stream
from data.tokenizers import build_encoding, encoding_from_record, encoding_record, end_of_text, token_bytes
from errors import UserError

if TYPE_CHECKING:
    from tiktoken import Encoding

SPLITS = ("train", "val")
SPLIT_WORDS = {"train": "train", "val": "val", "valid": "val", "validation": "val"}


@dataclass
class TokenData:
    """Opened tokens, with what is known of them."""

    train: Shards | Stream
    """(n_train,) token ids."""
    val: Shards
    """(n_val,) likewise."""
    encoding: "Encoding"
    vocab_size: int
    token_bytes: np.ndarray
    """(vocab_size,) int64: utf-8 bytes that each id stands for, 0 for special tokens."""
    record: dict
    """The content of tokens.json, or what there is of it."""

    def __str__(self) -> str:
        train = "streamed" if isinstance(self.train, Stream) else f"{len(self.train):,}"
        return f"{train} training and {len(self.val):,} validation tokens, vocabulary {self.vocab_size}"

    @property
    def separator(self) -> int | None:
        """The id that stands before each document; None where documents are not separated, or are but one."""
        return end_of_text(self.encoding) if self.record["separated"] else None


def open_tokens(cfg: DataConfig, say: Callable[[str], None] = print, *, val_tokens: int | None = None) -> TokenData:
    """Open the tokens of `cfg`, preparing them first if there are none, and then `say` so in one line.

    Of a stream as many validation tokens as `val_tokens` are read. Raises UserError for a source or tokenizer that
    cannot be had, a damaged folder, or no room for one.
    """
    if cfg.source == Source.bin:
        return open_bin(cfg)
    if cfg.tokenizer not in FROM_CORPUS:
        encoding = build_encoding(cfg.tokenizer)  # missing files should surface before a long read
    if cfg.stream:
        train, val, record = open_stream(cfg, encoding, val_tokens)
        return token_data(train, val, encoding, record)
    if not (folder := token_folder(cfg)).is_dir():
        prepare(cfg, folder, say)
    return read_tokens(folder)


def token_folder(cfg: DataConfig) -> Path:
    """Where the prepared tokens of `cfg` lie, or will."""
    return Path(cfg.cache_dir) / cache_key(cfg, identity(cfg))


def token_data(train: Shards | Stream, val: Shards, encoding: "Encoding", record: dict) -> TokenData:
    return TokenData(train, val, encoding, encoding.n_vocab, np.array(token_bytes(encoding), dtype=np.int64), record)


def read_tokens(folder: Path) -> TokenData:
    """Open a prepared folder; raises UserError naming the file that is truncated, damaged, exchanged or missing."""
    path = folder / RECORD_NAME
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise UserError(f"{path} is of format {record['format']}, and this is {FORMAT}; {remedy(folder)}")
        vocab_size, dtype = record["tokenizer"]["vocab_size"], np.dtype(record["dtype"])
        notes = [note for split in SPLITS for note in record["shards"][split]]
        whole = sum(note["tokens"] for note in notes) * dtype.itemsize <= CHECKED_WHOLE
        for note in notes:
            check_shard(folder / note["file"], note, dtype, whole)
        train, val = (
            Shards(
                [ShardFile(folder / note["file"], dtype, note["tokens"]) for note in record["shards"][split]],
                vocab_size,
            )
            for split in SPLITS
        )
        encoding = encoding_from_record(record["tokenizer"])
        return token_data(train, val, encoding, record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} or a file beside it is damaged ({reason}); {remedy(folder)}") from error


def check_shard(path: Path, note: dict, dtype: np.dtype, whole: bool) -> None:
    """UserError unless a token file has the recorded size and ends, or the recorded hash where it is read `whole`."""
    size, expected = path.stat().st_size, note["tokens"] * dtype.itemsize
    if size != expected:
        raise UserError(f"{path} has {size:,} bytes, not the recorded {expected:,}; {remedy(path.parent)}")
    found, recorded = (whole_sha256(path), note["sha256"]) if whole else (ends_sha256(path), note["ends_sha256"])
    if found != recorded:
        raise UserError(f"{path} is not the file that was written, by its checksum; {remedy(path.parent)}")


def remedy(folder: Path) -> str:
    return f"delete the folder {folder}, and it is prepared again"


# token files made elsewhere


def open_bin(cfg: DataConfig) -> TokenData:
    """Token files of nanoGPT or llm.c, train and val by their names, or a folder that scripts.prepare made."""
    path = Path(cfg.path or "").expanduser()
    if cfg.path is not None and (path / RECORD_NAME).is_file():
        data = read_tokens(path)
        if (kind := data.record["tokenizer"]["kind"]) != cfg.tokenizer:
            raise UserError(f"{path} holds tokens of {kind}; data.tokenizer={kind} takes them as they are")
        return data
    if cfg.tokenizer in FROM_CORPUS:
        raise UserError(
            f"data=bin with data.tokenizer={cfg.tokenizer} needs a folder with {RECORD_NAME}, which holds the "
            "vocabulary; prepare the text with data=text, or name the tokenizer that made the files"
        )
    files = bin_files(cfg)
    encoding = build_encoding(cfg.tokenizer)
    n_vocab = encoding.n_vocab
    shards = {split: [foreign_shard(file, n_vocab) for file in own] for split, own in files.items()}
    everything = [shard for own in shards.values() for shard in own]
    if len({shard.dtype for shard in everything}) > 1:
        raise UserError(f"data.path={cfg.path} mixes files of uint16 and uint32 ids; give those of one tokenizer")
    opened = {split: Shards(own, n_vocab) for split, own in shards.items()}
    whole = sum(shard.count * shard.dtype.itemsize for shard in everything) <= CHECKED_WHOLE
    for tokens in opened.values() if whole else ():
        for _ in tokens.chunks():  # an id beyond the vocabulary is refused
            pass
    digest_of = whole_sha256 if whole else ends_sha256
    known = [[(s.path.name, s.path.stat().st_size, digest_of(s.path)) for s in own] for own in shards.values()]
    record = {
        "format": FORMAT,
        "source": str(cfg.path),
        "corpus_sha256": digest(known),
        "revision": None,
        "separated": True,
        "split_rule": "by the names of the files",
        "tokenizer": encoding_record(encoding),
        "dtype": everything[0].dtype.name,
        "tokens": {split: len(tokens) for split, tokens in opened.items()},
    }
    return token_data(opened["train"], opened["val"], encoding, record)


def bin_files(cfg: DataConfig) -> dict[str, list[Path]]:
    """The .bin files of data.path by split: the word "val" in a name validates, "train" trains."""
    if cfg.path is None:
        raise UserError("data=bin needs data.path=FOLDER, or a glob, of train*.bin and val*.bin files")
    path = Path(cfg.path).expanduser()
    found = path.glob("*.bin") if path.is_dir() else map(Path, glob.glob(str(path), recursive=True))
    files = sorted(file for file in found if file.is_file())
    if beside := next((file.parent for file in files if (file.parent / RECORD_NAME).exists()), None):
        raise UserError(f"data.path={cfg.path} leaves out {RECORD_NAME}, which says what the ids are; give {beside}")
    by_split = {"train": [], "val": []}
    for file in files:
        words = {SPLIT_WORDS[word] for word in re.findall("[a-z]+", file.name.lower()) if word in SPLIT_WORDS}
        if len(words) > 1:
            raise UserError(f"{file} is named after both splits; rename it, or leave it out by a glob")
        for split in words:
            by_split[split].append(file)
    if missing := [split for split, own in by_split.items() if not own]:
        raise UserError(
            f"data.path={cfg.path} has no .bin file with {' or '.join(missing)} in its name, seen from {Path.cwd()}; "
            f"found: {', '.join(file.name for file in files[:5]) or 'none'}"
        )
    return by_split
