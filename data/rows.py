"""Text in a column: data sets of the Hugging Face Hub, and json or parquet files, by the `datasets` library."""

import glob
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data.config import DataConfig, Errors, Source
from data.text import cut, pieces_of, text_files
from errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

ROWS_AT_ONCE = 256
TEXT_KINDS = {"string", "large_string", "string_view", "str"}
NETWORK_TIMEOUT_S = 5


@dataclass(frozen=True)
class Rows:
    """Some rows of a data set; with `every`, those of them that validate, or those that do not."""

    dataset: "Dataset"
    """In Arrow's format."""
    column: str
    errors: Errors
    begin: int
    end: int
    every: int = 0
    validating: bool = False

    def read(self) -> Iterator[tuple[bool, str]]:
        """Whether a document begins, and the text, piece by piece; rows without text are left out."""
        import pyarrow

        for at in range(self.begin, self.end, ROWS_AT_ONCE):
            column = self.dataset[at : min(at + ROWS_AT_ONCE, self.end)][self.column]
            for row, raw in enumerate(column.cast(pyarrow.large_binary()).to_pylist(), start=at):
                text = self.decoded(raw or b"", row)
                if text and (not self.every or validates(text, self.every) == self.validating):
                    for i, piece in enumerate(cut(text)):
                        yield i == 0, piece

    def decoded(self, raw: bytes, row: int) -> str:
        try:
            return raw.decode("utf-8", self.errors)
        except UnicodeDecodeError as error:
            raise UserError(
                f"the column {self.column!r} is not utf-8 in row {row}: byte 0x{raw[error.start]:02x} at offset "
                f"{error.start}; data.errors=replace takes it as it is"
            ) from error


def validates(text: str, every: int) -> bool:
    """Whether a document is one of the `every`th part that validates: by a hash of its text, wherever it stands."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) % every == 0


def validating_share(cfg: DataConfig) -> int:
    """Of how many documents one validates; 0 where a split of its own does."""
    return 0 if cfg.val_split else round(1 / cfg.val_fraction)


@contextmanager
def explained(cfg: DataConfig) -> Iterator[None]:
    """Errors of `datasets` as one that says what to do."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # those of datasets, pyarrow and the hub have no common ancestor
        reason = error.__cause__ or error
        if isinstance(reason, OSError) and reason.errno is not None and type(reason).__module__ == "builtins":
            raise reason from error  # the disk's
        raise UserError(unavailable(cfg, reason)) from error


def unavailable(cfg: DataConfig, reason: BaseException) -> str:
    what = f"data.name={cfg.name}" if cfg.source == Source.hub else f"data.path={cfg.path}"
    line = f"{type(reason).__name__}: {reason}".splitlines()[0][:300]
    if cfg.source == Source.json and isinstance(reason, UnicodeDecodeError):
        for path in text_files(cfg):
            for _ in pieces_of(path, Errors.strict):  # says in which file, and where
                pass
    if cfg.source != Source.hub:
        return f"cannot read {what} as {cfg.source} ({line})"
    return (
        f"cannot have {what} ({line}); a copy of the data set in a folder does as well, data.name=FOLDER, and so do "
        "its files, data=parquet data.path=FILES"
    )


def offline_at_once(cfg: DataConfig) -> None:
    """Where the Hub does not answer, has `datasets` take what it has, instead of trying for half a minute."""
    import requests

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if Path(cfg.name).is_dir() or "HF_HUB_OFFLINE" in os.environ or "huggingface_hub" in sys.modules:
        return
    try:
        requests.head(endpoint, timeout=NETWORK_TIMEOUT_S)
    except requests.RequestException:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported


def load_builder(cfg: DataConfig, cache_dir: str | None = None):
    """The `datasets` builder of what is configured; files are parquet, json or csv, no code of the data set runs."""
    import datasets

    if cfg.source == Source.hub:
        builder = datasets.load_dataset_builder(cfg.name, cfg.subset, revision=cfg.revision)
        if re.fullmatch("[0-9a-f]{40}", cfg.revision or "") and builder.hash != cfg.revision:  # offline, what is there
            raise UserError(
                f"data.revision={cfg.revision} of {cfg.name} is not to be had offline, but {builder.hash} is; take that"
            )
        return builder
    files = [glob.escape(str(path.resolve())) for path in text_files(cfg)]
    # by the name "utf-8" the library would not look at encoding_errors
    more = {"encoding": "utf8", "encoding_errors": str(cfg.errors)} if cfg.source == Source.json else {}
    return datasets.load_dataset_builder(str(cfg.source), data_files=files, cache_dir=cache_dir, **more)


def revision_of(cfg: DataConfig, builder) -> str | None:
    """The commit of a data set of the Hub; None for what lies here."""
    return builder.hash if cfg.source == Source.hub and not Path(cfg.name).is_dir() else None


@contextmanager
def loading(cfg: DataConfig) -> Iterator[None]:
    """Around what `datasets` loads: no waiting for a Hub that is away, no chatter, and errors that say what to do."""
    if cfg.source == Source.hub:
        offline_at_once(cfg)
    import datasets  # not before

    with quiet(datasets), explained(cfg):
        yield


def check_column(cfg: DataConfig, kinds: dict[str, str]) -> None:
    """UserError where the column is missing or holds no text; `kinds` are all columns' types by name."""
    if cfg.column not in kinds:
        raise UserError(f"there is no column {cfg.column!r}; data.column= takes one of {', '.join(kinds)}")
    if kinds[cfg.column] not in TEXT_KINDS:
        texts = [name for name, kind in kinds.items() if kind in TEXT_KINDS]
        raise UserError(
            f"the column {cfg.column!r} holds {kinds[cfg.column]}, not text; columns of text are: "
            f"{', '.join(texts) or 'none'}"
        )


def check_split(splits: list[str], name: str) -> None:
    if name not in splits:
        raise UserError(f"there is no split {name!r}; data.train_split= and data.val_split= take {', '.join(splits)}")


@contextmanager
def quiet(datasets) -> Iterator[None]:
    """No download counting (which waits on the network), and progress bars on a terminal alone; then as before."""
    counting, had_bars = datasets.config.HF_UPDATE_DOWNLOAD_COUNTS, not datasets.are_progress_bars_disabled()
    hidden = had_bars and datasets.config.HF_DATASETS_DISABLE_PROGRESS_BARS is not False and not sys.stderr.isatty()
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    if hidden:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = counting
        if hidden:
            datasets.enable_progress_bars()
