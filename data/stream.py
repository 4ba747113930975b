"""Documents tokenised while training: in their order, in shares that go on from where a checkpoint left them.

B batch, T block_size. A share packs its documents end to end, and cuts rows of T+1 ids from them at stride T. After the
last document the first one follows.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from data.config import DataConfig
from data.rows import (
    check_column,
    check_split,
    explained,
    load_builder,
    loading,
    revision_of,
    validates,
    validating_share,
)
from data.shards import Shards
from data.sources import corpus_name, digest, identity, split_rule
from data.tokenizers import encode, encoding_record, end_of_text, token_dtype
from errors import UserError

if TYPE_CHECKING:
    from tiktoken import Encoding

SOUGHT = 1_000_000
"""Documents that are read to find enough validating ones, at most."""


@dataclass
class Stream:
    """What shares are opened from."""

    cfg: DataConfig
    builder: object
    """A `datasets.DatasetBuilder`."""
    encoding: "Encoding"
    every: int
    """Of how many documents of the training split one validates; 0 for none."""

    def documents(self, split: str):
        """A `datasets.IterableDataset` of the split's rows, with the one column."""
        return self.builder.as_streaming_dataset(split=split).select_columns(self.cfg.column)

    def ids(self, text: str) -> np.ndarray:
        """A document's ids, end-of-text before them."""
        separator = end_of_text(self.encoding) if self.cfg.separate else None
        begin = np.array([] if separator is None else [separator], token_dtype(self.encoding.n_vocab))
        return np.concatenate([begin, encode(self.encoding, text)])

    def trains(self, text: str) -> bool:
        return not (self.every and validates(text, self.every))


BEGINNING = {"state": None, "used": 0}


class Share:
    """The training documents of share `number` of `of`, as ids.

    `position`, plain values from which another Share goes on: {"state": of the data set before a document, or None
    before the first, "used": ids of that document that were taken}.
    """

    def __init__(self, stream: Stream, number: int, of: int, position: dict):
        self.stream, self.number, self.of = stream, number, of
        self.held: deque[tuple[dict | None, np.ndarray]] = deque()
        self.used, self.coming = position["used"], self._documents(position["state"])

    def _documents(self, state: dict | None) -> Iterator[tuple[dict | None, np.ndarray]]:
        """The data set's state before each document, and its ids; over and over."""
        from datasets.distributed import split_dataset_by_node

        cfg = self.stream.cfg
        while True:
            dataset, found = self.stream.documents(cfg.train_split), state is not None
            if self.of > 1:
                dataset = split_dataset_by_node(dataset, self.number, self.of)
            if state is not None:
                dataset.load_state_dict(state)
            with explained(cfg):
                for row in dataset:
                    text = row[cfg.column]
                    if text and self.stream.trains(text):
                        found = True
                        yield state, self.stream.ids(text)
                    state = dataset.state_dict()
            if not found:
                raise UserError(
                    f"share {self.number + 1} of {self.of} of {cfg.name or cfg.path} has no document to train on; "
                    "take fewer data.parts, or a smaller data.val_fraction"
                )
            state = None

    @property
    def position(self) -> dict:
        return {"state": self.held[0][0], "used": self.used}  # the last id taken is the next row's first, and held

    def take(self, n_rows: int, block_size: int) -> np.ndarray:
        """The next rows, (n_rows, T+1) int64."""
        needed = n_rows * block_size + 1
        have = sum(len(ids) for _, ids in self.held) - self.used
        while have < needed:
            self.held.append(next(self.coming))
            have += len(self.held[-1][1])
        ids = np.concatenate([ids for _, ids in self.held])[self.used :]
        rows = np.arange(n_rows)[:, None] * block_size + np.arange(block_size + 1)
        self.used += n_rows * block_size
        while self.used >= len(self.held[0][1]):
            self.used -= len(self.held.popleft()[1])
        return ids[rows].astype(np.int64)


class StreamBatches:
    """`batches(step) -> (x, y)`, int64 (B, T) each, one step after another; `rank` and `size` as in TrainBatches.

    Each share gives equal rows of every batch, so that the batch does not depend on the number of processes. `seed`
    chooses nothing: documents come in their order.
    """

    def __init__(self, stream: Stream, *, block_size: int, batch_size: int, seed: int):
        self.stream, self.block_size, self.parts = stream, block_size, stream.cfg.parts or 1
        self.n_rows = batch_size // self.parts
        self.go_to(0, [])

    def go_to(self, step: int, positions: list[dict]) -> None:
        """Goes on at `step`, with each share at its position; at their beginning where none are given.

        UserError where the positions are those of another number of shares.
        """
        if positions and len(positions) != self.parts:
            raise UserError(f"this run's stream has data.parts={len(positions)}, and keeps them; give no other number")
        self.next, self.begun, self.shares = step, positions or [BEGINNING] * self.parts, None
        self.latest: tuple[np.ndarray, np.ndarray] | None = None
        self.positions: dict[int, list[dict]] = {}

    def __call__(self, step: int, rank: int = 0, size: int = 1) -> tuple[np.ndarray, np.ndarray]:
        if step == self.next - 1 and self.latest:
            return self.latest
        assert step == self.next, f"a stream goes from step to step: {self.next} is next, not {step}"
        if self.shares is None:
            own = range(rank * self.parts // size, (rank + 1) * self.parts // size)
            self.shares = [Share(self.stream, number, self.parts, self.begun[number]) for number in own]
            self.positions[step] = [self.begun[number] for number in own]
        rows = np.concatenate([share.take(self.n_rows, self.block_size) for share in self.shares])
        self.latest, self.next = (np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])), step + 1
        self.positions[step + 1] = [share.position for share in self.shares]
        self.positions.pop(step - 2, None)
        return self.latest

    def hashes(self) -> dict[int, str]:
        """None: batches come one after another."""
        return {}

    def position(self, step: int) -> list[dict]:
        """Where this process's shares are before the batch of `step`, one of the newest."""
        return self.positions[step]


def open_stream(cfg: DataConfig, encoding: "Encoding", val_tokens: int | None) -> tuple[Stream, Shards, dict]:
    """The stream, the ids of the first validating documents, and what is known of both."""
    val_split = cfg.val_split or cfg.train_split
    with loading(cfg):
        builder = load_builder(cfg)
        stream, splits = Stream(cfg, builder, encoding, validating_share(cfg)), builder.as_streaming_dataset()
        for split in (cfg.train_split, val_split):
            check_split(list(splits), split)
            check_column(cfg, column_kinds(splits[split]))
        val = validation(stream, val_split, val_tokens)
    record = {
        "source": f"{corpus_name(cfg)}, streamed",
        "corpus_sha256": digest([*identity(cfg), revision := revision_of(cfg, builder)]),
        "revision": revision,
        "separated": cfg.separate,
        "split_rule": split_rule(cfg),
        "tokenizer": encoding_record(encoding),
        "tokens": {"val": len(val)},
    }
    return stream, val, record


def column_kinds(rows) -> dict[str, str]:
    """Columns' types, by the first values that are any."""
    kinds: dict[str, str] = {}
    for row in islice(rows, 1000):
        kinds |= {k: type(v).__name__ for k, v in row.items() if v is not None or k not in kinds}
        if "NoneType" not in kinds.values():
            break
    return kinds


def validation(stream: Stream, split: str, n_tokens: int | None) -> Shards:
    """Ids of the first documents that validate, at least `n_tokens` where there are as many."""
    cfg, found, count = stream.cfg, [], 0
    if n_tokens is None and stream.every:
        raise UserError(
            "train.eval_tokens=null takes the whole validation split, for which a stream would have to be read to its "
            "end; give train.eval_tokens=N, or a data.val_split"
        )
    for row in islice(stream.documents(split), SOUGHT):
        text = row[cfg.column]
        if text and not (stream.every and stream.trains(text)):
            found.append(stream.ids(text))
            count += len(found[-1])
            if n_tokens is not None and count >= n_tokens:
                break
    if not found:
        raise UserError(f"no document of {cfg.name or cfg.path} validates; raise data.val_fraction={cfg.val_fraction}")
    return Shards([np.concatenate(found)])
