"""Text to token ids and back: every tokenizer is a tiktoken Encoding, and a small record rebuilds it."""

import base64
import hashlib
import os
import tempfile
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data.config import Tokenizer
from data.shards import token_dtype
from data.text import cut
from errors import UserError

if TYPE_CHECKING:
    from tiktoken import Encoding

END_OF_TEXT = "<|endoftext|>"
OPENAI = "https://openaipublic.blob.core.windows.net"
DOWNLOADS = {  # tiktoken_ext/openai_public.py
    Tokenizer.gpt2: (f"{OPENAI}/gpt-2/encodings/main/vocab.bpe", f"{OPENAI}/gpt-2/encodings/main/encoder.json"),
    Tokenizer.cl100k_base: (f"{OPENAI}/encodings/cl100k_base.tiktoken",),
    Tokenizer.o200k_base: (f"{OPENAI}/encodings/o200k_base.tiktoken",),
}
NETWORK_TIMEOUT_S = 5
# GPT-2's, by which the words of `bpe` are cut too (Radford et al. 2019; tokenizers' ByteLevel has the same).
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def build_encoding(kind: Tokenizer, text: Iterable[str] = (), *, vocab_size: int = 0, separated: bool = True):
    """The Encoding named `kind`. `text` gives `char` its characters and `bpe` its `vocab_size` words.

    `char` has end-of-text only where documents are `separated`, the others always. Raises UserError where files of
    OpenAI's are neither cached nor to be had.
    """
    if kind == Tokenizer.bytes:
        return build_bytes()
    if kind == Tokenizer.char:
        return build_char({character for piece in text for character in set(piece)}, separated)
    if kind == Tokenizer.bpe:
        return build_bpe(learn_bpe(text, vocab_size - 1))
    return download(kind)


def build_bytes() -> "Encoding":
    from tiktoken import Encoding

    ranks = {bytes([i]): i for i in range(256)}
    return Encoding("bytes", pat_str=r"(?s).+", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 256})


def build_char(characters: Iterable[str], separated: bool) -> "Encoding":
    """Ids in sorted order of the characters, as in nanoGPT's shakespeare_char."""
    from tiktoken import Encoding

    ranks = {character.encode(): i for i, character in enumerate(sorted(characters))}
    special = {END_OF_TEXT: len(ranks)} if separated else {}
    return Encoding("char", pat_str=r"(?s).", mergeable_ranks=ranks, special_tokens=special)


def learn_bpe(text: Iterable[str], n_words: int) -> list[bytes]:
    """The bytes of each id, learnt by the `tokenizers` library in the order of its merges.

    Fewer than `n_words` where the text has no more pairs to join.
    """
    from tokenizers import Tokenizer as Learner
    from tokenizers import models, pre_tokenizers, trainers

    learner = Learner(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = byte_characters()
    trainer = trainers.BpeTrainer(vocab_size=n_words, initial_alphabet=list(alphabet), show_progress=False)
    learner.train_from_iterator(text, trainer)
    ids = learner.get_vocab()
    return [bytes(alphabet[character] for character in word) for word in sorted(ids, key=ids.get)]


def byte_characters() -> dict[str, int]:
    """The characters by which GPT-2's vocabulary and `tokenizers` write bytes (Radford et al. 2019, encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def build_bpe(words: list[bytes]) -> "Encoding":
    from tiktoken import Encoding

    ranks = {word: i for i, word in enumerate(words)}
    return Encoding("bpe", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: len(words)})


def download(kind: Tokenizer) -> "Encoding":
    import requests
    import tiktoken

    try:
        if not all(path.exists() for path in openai_files(kind)):
            # tiktoken itself waits without a limit.
            requests.head(DOWNLOADS[kind][0], timeout=NETWORK_TIMEOUT_S)
        return tiktoken.get_encoding(kind)
    except (OSError, ValueError) as error:
        raise UserError(download_advice(kind)) from error


def openai_files(kind: Tokenizer) -> list[Path]:
    """Where tiktoken looks for an encoding's files before it downloads them (tiktoken/load.py, `read_file_cached`)."""
    default = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR", default))
    return [Path(folder) / hashlib.sha1(url.encode()).hexdigest() for url in DOWNLOADS[kind]]


def download_advice(kind: Tokenizer) -> str:
    pairs = zip(DOWNLOADS[kind], openai_files(kind), strict=True)
    lines = "\n".join(f"  {url}\n    as {path}" for url, path in pairs)
    return (
        f"data.tokenizer={kind} needs files that could not be downloaded; put them in tiktoken's cache folder, "
        f"which TIKTOKEN_CACHE_DIR names, or use data.tokenizer=bytes, which needs none:\n{lines}"
    )


def encode(encoding: "Encoding", text: str) -> np.ndarray:
    """Token ids of `text`, (n_tokens,), in `token_dtype`; text that looks like a special token is ordinary text.

    Raises UserError for a character that a `char` vocabulary lacks.
    """
    # Checked first, for tiktoken would end in a Rust panic.
    if encoding.name == Tokenizer.char and (unknown := set(text) - known_characters(encoding)):
        shown = ", ".join(repr(character) for character in sorted(unknown)[:10])
        raise UserError(
            f"the vocabulary of {len(known_characters(encoding))} characters lacks {len(unknown)} of this text: "
            f"{shown}; leave them out, or train with data.tokenizer=bytes, which knows every text"
        )
    dtype = token_dtype(encoding.n_vocab)
    ids = [encoding.encode_to_numpy(piece, disallowed_special=()).astype(dtype) for piece in cut(text)]
    return np.concatenate(ids)


def decode(encoding: "Encoding", ids: list[int]) -> str:
    """Their text, U+FFFD for bytes that are none; ids that the encoding leaves out stand for nothing."""
    known = known_ids(encoding)
    return encoding.decode([i for i in ids if i in known], errors="replace")


@lru_cache(maxsize=4)
def known_ids(encoding: "Encoding") -> frozenset[int]:
    words = [*encoding.token_byte_values(), *(word.encode() for word in encoding.special_tokens_set)]
    return frozenset(encoding.encode_single_token(word) for word in words)


@lru_cache(maxsize=4)
def known_characters(encoding: "Encoding") -> frozenset[str]:
    return frozenset(token.decode() for token in encoding.token_byte_values())


def end_of_text(encoding: "Encoding") -> int | None:
    """The id that separates documents; None where the tokenizer has none."""
    return encoding.encode_single_token(END_OF_TEXT) if END_OF_TEXT in encoding.special_tokens_set else None


def vocabulary(encoding: "Encoding") -> list[bytes]:
    """The bytes of each id; none for special tokens, and for ids that cl100k_base and o200k_base leave out."""
    words = [b""] * encoding.n_vocab
    for word in encoding.token_byte_values():
        words[encoding.encode_single_token(word)] = word
    return words


def token_bytes(encoding: "Encoding") -> list[int]:
    """Length in utf-8 bytes of each id; 0 for special tokens, which stand for no text."""
    return [len(word) for word in vocabulary(encoding)]


def encoding_record(encoding: "Encoding") -> dict:
    """Plain values from which `encoding_from_record` rebuilds the Encoding without the corpus."""
    words = vocabulary(encoding)
    lengths = ",".join(str(len(word)) for word in words)
    record = {"kind": encoding.name, "vocab_size": encoding.n_vocab, "end_of_text": end_of_text(encoding)}
    if encoding.name == Tokenizer.char:
        record["characters"] = b"".join(words).decode()
    if encoding.name == Tokenizer.bpe:
        record["words"] = " ".join(base64.b64encode(word).decode() for word in words if word)
    record["sha256"] = hashlib.sha256(lengths.encode() + b"\n" + b"".join(words)).hexdigest()
    return record


def encoding_from_record(record: dict) -> "Encoding":
    """The Encoding of an `encoding_record`; raises UserError if it cannot be rebuilt exactly."""
    kind = record.get("kind")
    if kind not in list(Tokenizer):
        raise UserError(f"unknown tokenizer {kind!r} on record; known are {', '.join(Tokenizer)}")
    if kind == Tokenizer.char:
        encoding = build_char(record["characters"], record.get("end_of_text") is not None)
    elif kind == Tokenizer.bpe:
        encoding = build_bpe([base64.b64decode(word) for word in record["words"].split()])
    else:
        encoding = build_encoding(kind)
    if encoding_record(encoding) != record:
        raise UserError(f"the {kind} vocabulary differs from the recorded one; prepare the data again")
    return encoding
