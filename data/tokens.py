"""Token files: prepared once per (content, split rule, tokenizer), then opened as memory maps.

A cache folder holds train_000.bin and val_000.bin (bare ids, in the recorded dtype) and tokens.json.
"""

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data.config import DataConfig, Tokenizer
from data.sources import Corpus, corpus_sha256, load_corpus, split_rule
from data.tokenizers import build_encoding, encode, encoding_from_record, encoding_record, token_bytes, token_dtype
from errors import UserError

if TYPE_CHECKING:
    from tiktoken import Encoding

FORMAT = 1
TRAIN_NAME, VAL_NAME, RECORD_NAME = "train_000.bin", "val_000.bin", "tokens.json"


@dataclass
class TokenData:
    """An opened token cache."""

    train: np.memmap
    """(n_train,) token ids, read-only, uint16 or uint32."""
    val: np.memmap
    """(n_val,) likewise."""
    encoding: "Encoding"
    vocab_size: int
    token_bytes: np.ndarray
    """(vocab_size,) int64: utf-8 bytes that each id stands for, 0 for special tokens."""
    record: dict
    """The content of tokens.json."""


def open_tokens(cfg: DataConfig, say: Callable[[str], None] = print) -> TokenData:
    """Open the token cache of `cfg`, preparing it first if there is none, and then `say` so in one line.

    Raises UserError for a source or tokenizer that cannot be had, a damaged cache, or no room for one.
    """
    if cfg.tokenizer == Tokenizer.gpt2:
        build_encoding(cfg.tokenizer)  # missing files should surface before a long read
    folder = Path(cfg.cache_dir) / cache_key(cfg, corpus_sha256(cfg))
    if not folder.is_dir():
        folder = prepare(cfg, say)
    return read_tokens(folder)


def cache_key(cfg: DataConfig, corpus_hash: str) -> str:
    identity = [FORMAT, corpus_hash, split_rule(cfg), str(cfg.tokenizer)]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


def prepare(cfg: DataConfig, say: Callable[[str], None]) -> Path:
    """Load, encode and publish; returns the cache folder."""
    start, root = time.perf_counter(), Path(cfg.cache_dir)
    try:
        corpus = load_corpus(cfg)
        encoding = build_encoding(cfg.tokenizer, [*corpus.train, *corpus.val])
        folder = root / cache_key(cfg, corpus.sha256)
        counts = publish(folder, corpus, encoding, split_rule(cfg))
    except OSError as error:
        raise UserError(
            f"cannot write token files to {root}: {error.strerror or error}; "
            f"mend that, or choose another folder with data.cache_dir=FOLDER"
        ) from error
    size, seconds = count_text(sum(counts.values())), time.perf_counter() - start
    say(f"prepared {size} tokens ({encoding.name}) from {corpus.name} in {seconds:.1f} s -> {folder}")
    return folder


def publish(folder: Path, corpus: Corpus, encoding: "Encoding", rule: str) -> dict[str, int]:
    """Write beside `folder`, then rename, so that `folder` is whole or absent; returns tokens per split."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        counts = {
            "train": write_split(temporary / TRAIN_NAME, corpus.train, encoding),
            "val": write_split(temporary / VAL_NAME, corpus.val, encoding),
        }
        record = describe(corpus, encoding, rule, counts)
        with open(temporary / RECORD_NAME, "w", encoding="utf-8") as file:
            json.dump(record, file)
        rename_unless_there(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return counts


def write_split(path: Path, texts: list[str], encoding: "Encoding") -> int:
    count = 0
    with open(path, "wb") as file:
        for text in texts:
            ids = encode(encoding, text)
            file.write(ids.data)  # unlike ndarray.tofile, keeps the reason when the disk is full
            count += len(ids)
    return count


def describe(corpus: Corpus, encoding: "Encoding", rule: str, counts: dict[str, int]) -> dict:
    splits = {"train": corpus.train, "val": corpus.val}
    return {
        "format": FORMAT,
        "source": corpus.name,
        "corpus_sha256": corpus.sha256,
        "split_rule": rule,
        "tokenizer": encoding_record(encoding),
        "dtype": token_dtype(encoding.n_vocab).name,
        "tokens": counts,
        "characters": {split: sum(map(len, texts)) for split, texts in splits.items()},
        "bytes": {split: sum(len(text.encode()) for text in texts) for split, texts in splits.items()},
        "token_bytes": token_bytes(encoding),
    }


def rename_unless_there(temporary: Path, folder: Path) -> None:
    """Of several processes that prepare the same folder the first to finish wins; their content is equal."""
    try:
        os.rename(temporary, folder)
    except OSError:
        if not folder.is_dir():
            raise


def read_tokens(folder: Path) -> TokenData:
    """Open a cache folder; raises UserError naming the file that is truncated, damaged or missing."""
    path = folder / RECORD_NAME
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        tokenizer, dtype, counts = record["tokenizer"], np.dtype(record["dtype"]), record["tokens"]
        lengths = np.array(record["token_bytes"], dtype=np.int64)
        vocab_size = tokenizer["vocab_size"]
        train = open_split(folder / TRAIN_NAME, dtype, counts["train"], vocab_size)
        val = open_split(folder / VAL_NAME, dtype, counts["val"], vocab_size)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} or a file beside it is damaged ({reason}); {remedy(folder)}") from error
    return TokenData(train, val, encoding_from_record(tokenizer), vocab_size, lengths, record)


def open_split(path: Path, dtype: np.dtype, count: int, vocab_size: int) -> np.memmap:
    size, expected = path.stat().st_size, count * dtype.itemsize
    if size != expected:
        raise UserError(f"{path} has {size:,} bytes, not the recorded {expected:,}; {remedy(path.parent)}")
    tokens = np.memmap(path, dtype=dtype, mode="r", shape=(count,))
    if (largest := tokens.max()) >= vocab_size:
        raise UserError(f"{path} holds id {largest}, but vocab_size is {vocab_size}; {remedy(path.parent)}")
    return tokens


def remedy(folder: Path) -> str:
    return f"delete the folder {folder}, and it is prepared again"


def count_text(n: int) -> str:
    return f"{n / 1e6:.1f} M" if n >= 1e5 else f"{n:,}"
