"""Text to token ids and back: every tokenizer is a tiktoken Encoding, and a small record rebuilds it."""

import hashlib
import os
import tempfile
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data.config import Tokenizer
from errors import UserError

if TYPE_CHECKING:
    from tiktoken import Encoding

GPT2_URLS = (
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe",
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/encoder.json",
)
NETWORK_TIMEOUT_S = 5
# These treat every byte or character alone, so a text may be cut anywhere; GPT-2's merges may not.
CUT_ANYWHERE = {Tokenizer.bytes, Tokenizer.char}
PIECE_CHARS = 1 << 20


def build_encoding(kind: Tokenizer, text: Iterable[str] = ()) -> "Encoding":
    """The Encoding named `kind`. `text`, one string or many, gives `char` its characters, the others ignore it.

    Raises UserError if `gpt2` is neither cached nor to be had.
    """
    return BUILDERS[kind](text)


def build_bytes(text: Iterable[str]) -> "Encoding":
    from tiktoken import Encoding

    ranks = {bytes([i]): i for i in range(256)}
    return Encoding("bytes", pat_str=r"(?s).+", mergeable_ranks=ranks, special_tokens={})


def build_char(text: Iterable[str]) -> "Encoding":
    """Ids in sorted order of the characters, as in nanoGPT's shakespeare_char."""
    from tiktoken import Encoding

    characters = sorted({character for piece in text for character in set(piece)})
    ranks = {character.encode(): i for i, character in enumerate(characters)}
    return Encoding("char", pat_str=r"(?s).", mergeable_ranks=ranks, special_tokens={})


def build_gpt2(text: Iterable[str]) -> "Encoding":
    import requests
    import tiktoken

    try:
        if not all(path.exists() for path in gpt2_files()):
            # tiktoken itself waits without a limit.
            requests.head(GPT2_URLS[0], timeout=NETWORK_TIMEOUT_S)
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:
        raise UserError(gpt2_advice()) from error


def gpt2_files() -> list[Path]:
    """Where tiktoken looks for GPT-2's two files before it downloads them (tiktoken/load.py, `read_file_cached`)."""
    default = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR", default))
    return [Path(folder) / hashlib.sha1(url.encode()).hexdigest() for url in GPT2_URLS]


def gpt2_advice() -> str:
    pairs = "\n".join(f"  {url}\n    as {path}" for url, path in zip(GPT2_URLS, gpt2_files(), strict=True))
    return (
        f"data.tokenizer=gpt2 needs two files that could not be downloaded; put them in tiktoken's cache folder, "
        f"which TIKTOKEN_CACHE_DIR names, or use data.tokenizer=bytes, which needs none:\n{pairs}"
    )


BUILDERS = {Tokenizer.bytes: build_bytes, Tokenizer.char: build_char, Tokenizer.gpt2: build_gpt2}


def encode(encoding: "Encoding", text: str) -> np.ndarray:
    """Token ids of `text`, (n_tokens,), in `token_dtype`; text that looks like a special token is ordinary text.

    Raises UserError for a character that a `char` vocabulary lacks.
    """
    # Checked first, for tiktoken would end in a Rust panic.
    if encoding.name == Tokenizer.char and (unknown := set(text) - known_characters(encoding)):
        shown = ", ".join(repr(character) for character in sorted(unknown)[:10])
        raise UserError(
            f"the vocabulary of {encoding.n_vocab} characters lacks {len(unknown)} of this text: {shown}; "
            f"leave them out, or train with data.tokenizer=bytes, which knows every text"
        )
    size = PIECE_CHARS if encoding.name in CUT_ANYWHERE else max(1, len(text))
    pieces = (text[i : i + size] for i in range(0, len(text), size))
    dtype = token_dtype(encoding.n_vocab)
    ids = [encoding.encode_to_numpy(piece, disallowed_special=()).astype(dtype) for piece in pieces]
    return np.concatenate(ids) if ids else np.empty(0, dtype)


@lru_cache(maxsize=4)
def known_characters(encoding: "Encoding") -> frozenset[str]:
    return frozenset(token.decode() for token in vocabulary(encoding))


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id below `vocab_size`."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def vocabulary(encoding: "Encoding") -> list[bytes]:
    """The bytes of each id."""
    return [encoding.decode_single_token_bytes(i) for i in range(encoding.n_vocab)]


def token_bytes(encoding: "Encoding") -> list[int]:
    """Length in utf-8 bytes of each id; 0 for special tokens, which stand for no text."""
    return [0 if encoding.is_special_token(i) else len(token) for i, token in enumerate(vocabulary(encoding))]


def encoding_record(encoding: "Encoding") -> dict:
    """Plain values from which `encoding_from_record` rebuilds the Encoding without the corpus."""
    tokens = vocabulary(encoding)
    lengths = ",".join(str(len(token)) for token in tokens)
    record = {"kind": encoding.name, "vocab_size": encoding.n_vocab}
    if encoding.name == Tokenizer.char:
        record["characters"] = b"".join(tokens).decode()
    record["sha256"] = hashlib.sha256(lengths.encode() + b"\n" + b"".join(tokens)).hexdigest()
    return record


def encoding_from_record(record: dict) -> "Encoding":
    """The Encoding of an `encoding_record`; raises UserError if it cannot be rebuilt exactly."""
    if record.get("kind") not in BUILDERS:
        raise UserError(f"unknown tokenizer {record.get('kind')!r} on record; known are {', '.join(BUILDERS)}")
    encoding = build_encoding(record["kind"], record.get("characters", ""))
    if encoding_record(encoding) != record:
        raise UserError(f"the {record['kind']} vocabulary differs from the recorded one; prepare the data again")
    return encoding
