"""What to train on and how it becomes tokens."""

from dataclasses import dataclass, fields
from enum import StrEnum

from errors import UserError


class Source(StrEnum):
    """Where the text comes from."""

    stdlib = "stdlib"
    text = "text"
    json = "json"
    parquet = "parquet"
    hub = "hub"
    bin = "bin"


class Tokenizer(StrEnum):
    """How text becomes token ids."""

    bytes = "bytes"
    char = "char"
    gpt2 = "gpt2"
    cl100k_base = "cl100k_base"
    o200k_base = "o200k_base"
    bpe = "bpe"


class Errors(StrEnum):
    """What becomes of bytes that are not utf-8."""

    strict = "strict"
    replace = "replace"


FILES = {Source.text, Source.json, Source.parquet, Source.bin}
STREAMED = {Source.json, Source.parquet, Source.hub}
OF_THE_HUB = {"name", "subset", "revision", "train_split", "val_split"}
# These take their vocabulary from the corpus.
FROM_CORPUS = {Tokenizer.char, Tokenizer.bpe}


@dataclass
class DataConfig:
    """The group `data`."""

    source: Source = Source.stdlib
    """`stdlib`: the Python standard library's own source, no download. `text`: your own utf-8 files. `json`, `parquet`:
    a column of your own files. `hub`: a column of a data set of the Hugging Face Hub. `bin`: token files."""

    path: str | None = None
    """For `text`, `json`, `parquet`, `bin`: a file, a glob such as "books/**/*.txt", or a folder, read recursively."""

    url: str | None = None
    """For `text` without a path: one file to download, once, through `datasets`."""

    name: str | None = None
    """For `hub`: OWNER/NAME, or a local folder that `datasets.load_dataset` reads."""

    subset: str | None = None
    """For `hub`: the configuration of the data set, where it has several."""

    revision: str | None = None
    """For `hub`: a branch, tag or commit; what it led to is recorded."""

    column: str = "text"
    """For `hub`, `json` and `parquet`: the column that holds the text, one document a row."""

    separate: bool = True
    """End-of-text stands before every document; false where rows are but lines of one text, as wikitext's."""

    train_split: str = "train"
    val_split: str | None = None
    """For `hub`: the splits to train and to validate on. Without a val_split, part of the training one validates."""

    val_fraction: float = 0.1
    """The part that validates: for `text` the last share of the characters; for `hub`, `json` and `parquet` one
    document in round(1 / val_fraction), by a hash of its text. `stdlib` keeps every 20th file."""

    errors: Errors = Errors.strict
    """`strict`: text that is not utf-8 is refused. `replace`: such bytes become U+FFFD."""

    tokenizer: Tokenizer = Tokenizer.bytes
    """`bytes`: 256 ids and end-of-text. `char`: the characters that occur. `gpt2`, `cl100k_base` and `o200k_base`:
    OpenAI's 50,257, 100,277 and 200,019, downloaded by tiktoken. `bpe`: `vocab_size`, learnt from the train split."""

    vocab_size: int = 4096
    """For tokenizer=bpe: ids to learn, the 256 bytes and end-of-text included."""

    stream: bool = False
    """For `hub`, `json` and `parquet`: tokenise while training, and keep nothing; batches come in the order of the
    documents, not shuffled."""

    parts: int | None = None
    """With stream: shares into which documents go by turns, each the source of equal rows of every batch; as many as
    processes where not given. Equal parts make equal batches, for any number of processes that divides them."""

    document_mask: bool = False
    """Attention stays within a document."""

    num_proc: int | None = None
    """Processes that tokenise; one for each core where not given. It changes no token."""

    cache_dir: str = ".cache/tokens"
    """Folder of the prepared token files; safe to delete."""

    def __post_init__(self) -> None:
        if not 0 < self.val_fraction < 1:
            raise UserError(f"data.val_fraction={self.val_fraction} must lie between 0 and 1; nanoGPT uses 0.1")
        by_document = self.source in STREAMED and self.val_split is None
        if by_document and self.val_fraction > 0.5:
            raise UserError(f"data.val_fraction={self.val_fraction} of documents must be at most 0.5: one in two")
        if self.path is not None and self.source not in FILES:
            raise UserError(
                f"data.path={self.path} needs data=text beside it, or json, parquet or bin; data={self.source} reads "
                "no files of yours"
            )
        if self.source == Source.hub and self.name is None:
            raise UserError("data=hub needs data.name=OWNER/NAME, or a local folder that holds a data set")
        for f in fields(self) if self.source != Source.hub else ():
            if f.name in OF_THE_HUB and getattr(self, f.name) != f.default:
                raise UserError(f"data.{f.name}={getattr(self, f.name)} needs data=hub beside it")
        if self.stream and self.source not in STREAMED:
            raise UserError(
                f"data.stream=true is for data={', '.join(sorted(STREAMED))} and the Hub's named sets; "
                f"data={self.source} is prepared once, leave it out"
            )
        if self.stream and self.tokenizer in FROM_CORPUS:
            raise UserError(
                f"data.tokenizer={self.tokenizer} is made from the whole text, which data.stream=true never has; "
                "choose bytes or gpt2, or leave data.stream out"
            )
        for name in ("parts", "num_proc"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"data.{name}={value} must be at least 1")
        if self.parts is not None and not self.stream:
            raise UserError(f"data.parts={self.parts} is for data.stream=true; leave it out")
        if self.vocab_size < 257:
            raise UserError(f"data.vocab_size={self.vocab_size} must be at least 257: 256 bytes and end-of-text")
