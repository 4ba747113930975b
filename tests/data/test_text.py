"""Pieces of text and files: nothing is lost between them, and no tokenizer would have joined what they part."""

import random
import re

import numpy as np
import pytest

from data import text
from data.config import Errors, Tokenizer
from data.text import FileText, cut, pieces_of, split_characters, universal_newlines
from data.tokenizers import build_encoding
from errors import UserError

ALPHABETS = [
    "ab \n", "aB1 .,\n'\r", "héé ñ\u0301x", "漢字 。\n1", "\t \u00a0\u2028a\n", "don't we'll 12345 ((\n\n",
    "👍🏽 a\u200d\n", "²½ x\n",
]  # fmt: skip


def random_text(rng: random.Random, n: int) -> str:
    alphabet = rng.choice(ALPHABETS)
    return "".join(rng.choice(alphabet) * rng.choice((1, 1, 1, 2, 3)) for _ in range(n))


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(text, "PIECE", 12)
    monkeypatch.setattr(text, "TAILS", (8, 40))


@pytest.mark.usefixtures("small_pieces", "gpt2_vocabulary")
@pytest.mark.parametrize("kind", [Tokenizer.gpt2, Tokenizer.bpe, "cl100k_base", "o200k_base"])
def test_the_ids_of_pieces_are_those_of_the_whole(kind):
    rng = random.Random(0)
    texts = [random_text(rng, 100) for _ in range(300)]
    encoding = patterned(kind, texts)
    n_pieces = 0
    for whole in texts:
        pieces = list(cut(whole))
        n_pieces += len(pieces)
        assert "".join(pieces) == whole
        assert [i for piece in pieces for i in encoding.encode_ordinary(piece)] == encoding.encode_ordinary(whole)
    assert n_pieces > 3 * len(texts)


def patterned(kind: str, texts: list[str]):
    """The encoding; where its vocabulary cannot be had, one learnt from the texts, with its pattern, which counts."""
    from tiktoken import Encoding
    from tiktoken_ext import openai_public

    if kind in (Tokenizer.gpt2, Tokenizer.bpe):
        return build_encoding(kind, texts, vocab_size=600)
    words = build_encoding(Tokenizer.bpe, texts, vocab_size=600)
    read = openai_public.load_tiktoken_bpe
    openai_public.load_tiktoken_bpe = lambda *_, **__: {}
    try:
        pattern = getattr(openai_public, kind)()["pat_str"]
    finally:
        openai_public.load_tiktoken_bpe = read
    ranks = {word: i for i, word in enumerate(words.token_byte_values())}
    return Encoding(kind, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def test_a_cut_at_any_place_would_be_seen(gpt2_vocabulary, monkeypatch):
    """That the test above can fail: with pieces that end anywhere the ids differ."""
    monkeypatch.setattr(text, "PIECE", 12)
    monkeypatch.setattr(text, "END", re.compile(""))
    whole = "undisturbed words  and   blanks\n" * 10
    encoding = build_encoding(Tokenizer.gpt2)
    ids = [i for piece in cut(whole) for i in encoding.encode_ordinary(piece)]
    assert ids != encoding.encode_ordinary(whole)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_a_file_are_its_text(tmp_path, seed):
    rng = random.Random(seed)
    raw = "".join(random_text(rng, 50) for _ in range(20)).encode()
    (tmp_path / "a.txt").write_bytes(raw)
    pieces = list(pieces_of(tmp_path / "a.txt", Errors.strict))
    read = list(FileText(pieces, Errors.strict).read())
    assert "".join(piece for _, piece in read) == universal_newlines(raw.decode())
    assert [len(piece) for _, piece in read] == [piece.n_chars for piece in pieces]
    assert [begins for begins, _ in read] == [True] + [False] * (len(pieces) - 1)
    assert len(pieces) > 10


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("fraction", [0.1, 0.37, 0.5, 0.93])
def test_the_characters_are_cut_at_nanogpts_place(tmp_path, fraction):
    rng = random.Random(1)
    raw = random_text(rng, 300).encode()
    (tmp_path / "a.txt").write_bytes(raw)
    whole = universal_newlines(raw.decode())
    train, val = split_characters(list(pieces_of(tmp_path / "a.txt", Errors.strict)), fraction)
    at = int(len(whole) * (1 - fraction))
    for pieces, expected in ((train, whole[:at]), (val, whole[at:])):
        assert "".join(piece for _, piece in FileText(pieces, Errors.strict).read()) == expected
        assert sum(piece.n_chars for piece in pieces) == len(expected)


@pytest.mark.parametrize(
    "line", [b"word " * 1_000_000, b"x" * 5_000_000, "漢".encode() * 2_000_000, b"\r\n" * 2_000_000]
)
def test_a_long_line_is_read_in_pieces_or_at_once(tmp_path, monkeypatch, line):
    monkeypatch.setattr(text, "MOST", 3 * 2**20)
    (tmp_path / "a.txt").write_bytes(line)
    pieces = list(pieces_of(tmp_path / "a.txt", Errors.strict))
    assert "".join(t for _, t in FileText(pieces, Errors.strict).read()) == universal_newlines(line.decode())
    assert max(piece.end - piece.begin for piece in pieces) <= 4 * 2**20
    assert "".join(cut(line.decode())) == line.decode()


BAD = {
    "latin-1": (
        b"good text, " * 3 + b"caf\xe9 bad",
        r"a\.txt is not utf-8: byte 0xe9 at offset 36; .*data\.errors=replace",
    ),
    "utf-16": ("some text".encode("utf-16-le"), r"a\.txt is binary \(zero byte at offset 1\)"),
    "cut off": (b"good text, " * 3 + "é".encode()[:1], r"byte 0xc3 at offset 33"),
}


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("raw", "message"), BAD.values(), ids=BAD)
def test_the_place_of_what_is_no_text_is_named(tmp_path, raw, message):
    (tmp_path / "a.txt").write_bytes(raw)
    with pytest.raises(UserError, match=message):
        list(pieces_of(tmp_path / "a.txt", Errors.strict))


@pytest.mark.usefixtures("small_pieces")
def test_bytes_that_are_no_text_are_replaced_where_asked(tmp_path):
    rng = np.random.default_rng(0)
    raw = bytes(rng.choice([*b"ab \n", 0xC3, 0xA9, 0xFF], 3000).astype(np.uint8))
    (tmp_path / "a.txt").write_bytes(raw)
    pieces = list(pieces_of(tmp_path / "a.txt", Errors.replace))
    assert "".join(t for _, t in FileText(pieces, Errors.replace).read()) == raw.decode(errors="replace")
