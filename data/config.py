"""What to train on and how it becomes tokens."""

from dataclasses import dataclass
from enum import StrEnum

from errors import UserError


class Source(StrEnum):
    """Where the text comes from."""

    stdlib = "stdlib"
    text = "text"


class Tokenizer(StrEnum):
    """How text becomes token ids."""

    bytes = "bytes"
    char = "char"
    gpt2 = "gpt2"


@dataclass
class DataConfig:
    """The group `data`."""

    source: Source = Source.stdlib
    """`stdlib`: the Python standard library's own source, no download. `text`: your own utf-8 files."""

    path: str | None = None
    """For `text`: a file, a glob such as "books/**/*.txt", or a folder, read recursively."""

    url: str | None = None
    """For `text` without a path: one file to download, once, through `datasets`."""

    tokenizer: Tokenizer = Tokenizer.bytes
    """`bytes`: 256 ids. `char`: the characters that occur. `gpt2`: GPT-2's 50,257 ids, downloaded by tiktoken."""

    val_fraction: float = 0.1
    """For `text`: the last share of the characters that is the validation split. `stdlib` keeps every 20th file."""

    cache_dir: str = ".cache/tokens"
    """Folder of the prepared token files; safe to delete."""

    def __post_init__(self) -> None:
        if not 0 < self.val_fraction < 1:
            raise UserError(f"data.val_fraction={self.val_fraction} must lie between 0 and 1; nanoGPT uses 0.1")
        if self.path is not None and self.source != Source.text:
            raise UserError(
                f"data.path={self.path} needs data=text beside it; data={self.source} reads no files of yours"
            )
