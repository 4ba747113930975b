import hashlib
import json
import random
import time

import numpy as np
import pytest
import requests
import tiktoken

from data.config import Tokenizer
from data.tokenizers import (
    GPT2_URLS,
    PIECE_CHARS,
    build_encoding,
    encode,
    encoding_from_record,
    encoding_record,
    gpt2_files,
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


def require_gpt2():
    if not all(path.exists() for path in gpt2_files()):
        pytest.skip("GPT-2's vocabulary files are not in tiktoken's cache")


@pytest.mark.parametrize("kind", list(Tokenizer))
@pytest.mark.parametrize("seed", range(5))
def test_round_trip_of_random_unicode(kind, seed):
    if kind == Tokenizer.gpt2:
        require_gpt2()
    text = random_text(seed) + "".join(map(chr, range(256))) + "<|endoftext|>"
    encoding = build_encoding(kind, text)
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
    assert token_bytes(encoding) == [1] * 256


def test_char_ids_are_in_sorted_order():
    encoding = build_encoding(Tokenizer.char, ["hello ", "wörld"])
    assert encode(encoding, " dehlorwö").tolist() == list(range(9))
    assert token_bytes(encoding) == [1] * 8 + [2]
    assert encoding_record(encoding)["characters"] == " dehlorwö"


def test_char_refuses_unknown_characters():
    encoding = build_encoding(Tokenizer.char, "abc")
    with pytest.raises(UserError, match=r"vocabulary of 3 characters lacks 2 of this text: 'é', '漢'"):
        encode(encoding, "a漢béa")


@pytest.mark.parametrize("kind", [Tokenizer.bytes, Tokenizer.char])
def test_pieces_join_without_a_seam(kind):
    text = "aé漢" * (PIECE_CHARS // 3 + 10)
    encoding = build_encoding(kind, text)
    assert encoding.decode(encode(encoding, text).tolist()) == text


def test_merges_are_never_cut():
    encoding = tiktoken.Encoding("small", **SMALL_BPE)
    n = PIECE_CHARS // 4 + 5
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
    encoding = tiktoken.Encoding("synthetic", pat_str=r"(?s).", mergeable_ranks=ranks, special_tokens={})
    text = "".join(chr(0x10000 + i) for i in (0, 65_279, 65_280, 65_281, 100_020))
    ids = encode(encoding, text)
    assert (ids.dtype, ids.tolist()) == (np.uint32, [256, 65_535, 65_536, 65_537, 100_276])
    assert encoding.decode(ids.tolist()) == text


def test_a_record_that_does_not_fit_is_refused():
    record = encoding_record(build_encoding(Tokenizer.char, "abc"))
    for damaged in ({**record, "characters": "abd"}, {**record, "vocab_size": 4}, {**record, "sha256": "0"}):
        with pytest.raises(UserError, match="char vocabulary differs from the recorded one"):
            encoding_from_record(damaged)
    with pytest.raises(UserError, match="unknown tokenizer 'p50k'"):
        encoding_from_record({"kind": "p50k"})


@pytest.mark.parametrize("failure", [requests.ConnectionError("no network"), requests.Timeout("slow")])
def test_gpt2_offline_names_files_and_folder(tmp_path, monkeypatch, failure):
    def fail(*args, **kwargs):
        raise failure

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(requests, "head", fail)
    monkeypatch.setattr(requests, "get", fail)
    start = time.perf_counter()
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR") as caught:
        build_encoding(Tokenizer.gpt2)
    assert time.perf_counter() - start < 5
    for url in GPT2_URLS:
        assert url in str(caught.value)
        assert str(tmp_path / hashlib.sha1(url.encode()).hexdigest()) in str(caught.value)
