import hashlib
import json
import random
import time

import numpy as np
import pytest
import requests
import tiktoken

from data.config import Tokenizer
from data.text import PIECE
from data.tokenizers import (
    DOWNLOADS,
    build_encoding,
    decode,
    encode,
    encoding_from_record,
    encoding_record,
    end_of_text,
    learn_bpe,
    token_bytes,
    token_dtype,
)
from errors import UserError

# Merges over the alphabet, with a pattern that joins letters: a small stand-in for GPT-2's scheme.
SMALL_BPE = {
    "pat_str": r"(?s)\w+|\W+",
    "mergeable_ranks": {bytes([i]): i for i in range(256)} | {b"ab": 256, b"abab": 257},
    "special_tokens": {"<|end|>": 258},
}


def random_text(seed: int, n: int = 500) -> str:
    rng = random.Random(seed)
    planes = [(0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)]
    return "".join(chr(rng.randint(*rng.choice(planes))) for _ in range(n))


@pytest.mark.usefixtures("gpt2_vocabulary")
@pytest.mark.parametrize("kind", [Tokenizer.bytes, Tokenizer.char, Tokenizer.gpt2, Tokenizer.bpe])
@pytest.mark.parametrize("seed", range(5))
def test_round_trip_of_random_unicode(kind, seed):
    text = random_text(seed) + "".join(map(chr, range(256))) + "<|endoftext|>"
    encoding = build_encoding(kind, [text], vocab_size=400)
    ids = encode(encoding, text)
    assert encoding.decode(ids.tolist()) == text
    lengths = np.array(token_bytes(encoding))
    assert lengths[ids].sum() == len(text.encode())
    rebuilt = encoding_from_record(json.loads(json.dumps(encoding_record(encoding))))
    np.testing.assert_array_equal(encode(rebuilt, text), ids)


def test_bytes_are_their_own_ids():
    text = random_text(0)
    encoding = build_encoding(Tokenizer.bytes)
    assert encode(encoding, text).tolist() == list(text.encode())
    assert encoding.decode_bytes(list(range(256))) == bytes(range(256))
    assert token_bytes(encoding) == [1] * 256 + [0]
    assert (end_of_text(encoding), encoding.n_vocab) == (256, 257)


def test_char_ids_are_in_sorted_order():
    encoding = build_encoding(Tokenizer.char, ["hello ", "wörld"], separated=False)
    assert encode(encoding, " dehlorwö").tolist() == list(range(9))
    assert token_bytes(encoding) == [1] * 8 + [2]
    assert encoding_record(encoding)["characters"] == " dehlorwö"
    assert end_of_text(encoding) is None
    assert end_of_text(build_encoding(Tokenizer.char, ["hello "], separated=True)) == 5


def test_char_refuses_unknown_characters():
    encoding = build_encoding(Tokenizer.char, "abc")
    with pytest.raises(UserError, match=r"vocabulary of 3 characters lacks 2 of this text: 'é', '漢'"):
        encode(encoding, "a漢béa")


@pytest.mark.parametrize("kind", [Tokenizer.bytes, Tokenizer.char])
def test_pieces_join_without_a_seam(kind):
    text = "aé漢 " * (PIECE // 3 + 10)
    encoding = build_encoding(kind, text)
    assert encoding.decode(encode(encoding, text).tolist()) == text


def test_merges_are_never_cut():
    encoding = tiktoken.Encoding("small", **SMALL_BPE)
    n = PIECE // 4 + 5
    assert encode(encoding, "x" + "abab" * n).tolist() == [ord("x")] + [257] * n


def test_special_tokens_are_ordinary_text_and_count_no_bytes():
    encoding = tiktoken.Encoding("small", **SMALL_BPE)
    assert 258 not in encode(encoding, "a<|end|>")
    assert token_bytes(encoding)[256:] == [2, 4, 0]


def test_empty_text_has_no_tokens():
    ids = encode(build_encoding(Tokenizer.bytes), "")
    assert (ids.shape, ids.dtype) == ((0,), np.uint16)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_dtype_follows_the_vocabulary(vocab_size, dtype):
    assert token_dtype(vocab_size) == dtype
    assert np.array([vocab_size - 1]).astype(token_dtype(vocab_size)) == vocab_size - 1


def test_ids_beyond_65535_survive():
    words = {chr(0x10000 + i).encode(): 256 + i for i in range(100_277 - 256)}
    ranks = {bytes([i]): i for i in range(256)} | words
    special = {"<|endoftext|>": 100_277}
    encoding = tiktoken.Encoding("synthetic", pat_str=r"(?s).", mergeable_ranks=ranks, special_tokens=special)
    text = "".join(chr(0x10000 + i) for i in (0, 65_279, 65_280, 65_281, 100_020))
    ids = encode(encoding, text)
    assert (ids.dtype, ids.tolist()) == (np.uint32, [256, 65_535, 65_536, 65_537, 100_276])
    assert encoding.decode(ids.tolist()) == text


def test_a_record_that_does_not_fit_is_refused():
    record = encoding_record(build_encoding(Tokenizer.char, "abc"))
    for damaged in ({**record, "characters": "abd"}, {**record, "vocab_size": 5}, {**record, "sha256": "0"}):
        with pytest.raises(UserError, match="char vocabulary differs from the recorded one"):
            encoding_from_record(damaged)
    with pytest.raises(UserError, match="unknown tokenizer 'p50k'"):
        encoding_from_record({"kind": "p50k"})


@pytest.mark.parametrize("kind", list(DOWNLOADS))
@pytest.mark.parametrize("failure", [requests.ConnectionError("no network"), requests.Timeout("slow")])
def test_offline_the_files_and_their_folder_are_named(tmp_path, monkeypatch, failure, kind):
    def fail(*args, **kwargs):
        raise failure

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(requests, "head", fail)
    monkeypatch.setattr(requests, "get", fail)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    start = time.perf_counter()
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR") as caught:
        build_encoding(kind)
    assert time.perf_counter() - start < 5
    for url in DOWNLOADS[kind]:
        assert url in str(caught.value)
        assert str(tmp_path / hashlib.sha1(url.encode()).hexdigest()) in str(caught.value)


def test_ids_that_an_encoding_leaves_out_stand_for_nothing():
    """As cl100k_base and o200k_base do."""
    ranks = {bytes([i]): i for i in range(256)}
    special = {"<|endoftext|>": 257, "<|endofprompt|>": 260}
    encoding = tiktoken.Encoding("gaps", pat_str=r"(?s).", mergeable_ranks=ranks, special_tokens=special)
    assert token_bytes(encoding) == [1] * 256 + [0] * 5
    assert encoding_record(encoding)["vocab_size"] == 261


def test_learnt_words_are_those_of_the_tokenizers_library(text_file):
    """The same ids from `tokenizers` as from tiktoken, on the text that they learnt from and on random text."""
    from tokenizers import Tokenizer as Learner
    from tokenizers import models, pre_tokenizers, trainers

    learner, text = Learner(models.BPE()), text_file.read_text()
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=1499, initial_alphabet=alphabet, show_progress=False)
    )
    encoding = build_encoding(Tokenizer.bpe, [text], vocab_size=1500)
    assert (encoding.n_vocab, end_of_text(encoding)) == (1500, 1499)
    rng = random.Random(0)
    words = text.split(" ")
    mixed = ["".join(rng.choices(text, k=60)) + " ".join(rng.choices(words, k=60)) for _ in range(200)]
    for sample in [text, *(random_text(seed) for seed in range(20)), *mixed]:
        assert learner.encode(sample).ids == encode(encoding, sample).tolist()


def test_learning_twice_gives_the_same_words(text_file):
    text = text_file.read_text()
    assert learn_bpe([text], 800) == learn_bpe([text], 800)


def test_a_small_text_gives_fewer_words_than_asked_for():
    encoding = build_encoding(Tokenizer.bpe, ["abc abc"], vocab_size=4096)
    assert encoding.n_vocab < 270
    assert encoding.decode(encode(encoding, "cab abc").tolist()) == "cab abc"


def test_ids_that_an_encoding_leaves_out_are_not_decoded():
    ranks = {bytes([i]): i for i in range(256)}
    special = {"<|endoftext|>": 257, "<|endofprompt|>": 260}
    encoding = tiktoken.Encoding("gaps", pat_str=r"(?s).", mergeable_ranks=ranks, special_tokens=special)
    assert decode(encoding, [104, 256, 105, 259, 257]) == "hi<|endoftext|>"
