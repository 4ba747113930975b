"""Token ids in files, ours, nanoGPT's headerless ones, llm.c's with a header, as one array that is never read whole.

llm.c's header is 256 int32: a magic number, a version, the number of tokens (llm.c, dev/data/data_common.py);
modded-nanogpt's is the same.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from errors import UserError

HEADER_BYTES = 256 * 4
HEADERS = {20240520: (1, np.dtype(np.uint16)), 20240801: (7, np.dtype(np.uint32))}
END_BYTES = 4096
CHECKED_WHOLE = 2**28
"""Bytes of token files up to which all are read when they are opened; of larger ones, the ends alone."""
MAPPED_FILES = 64
"""Files that are mapped at once: each holds a descriptor, of which there may be 1024."""
MAPPED_BYTES = 2**26
"""Read before pages are given back, about: a mapped page counts as this process's memory."""
PAGES = 2**16
"""Bytes that reading one place maps, with its neighbours."""


@dataclass(frozen=True)
class ShardFile:
    """A file of token ids."""

    path: Path
    dtype: np.dtype
    count: int
    offset: int = 0
    """Bytes before the first id."""

    def __len__(self) -> int:
        return self.count

    def map(self) -> np.ndarray:
        return np.memmap(self.path, dtype=self.dtype, mode="r", offset=self.offset, shape=(self.count,))


class Shards:
    """(n,) token ids in files, each mapped when it is first read, or in arrays.

    `vocab_size`, where given, is what every id that is read must lie below.
    """

    def __init__(self, parts: Sequence[ShardFile | np.ndarray], vocab_size: int | None = None):
        self.parts, self.vocab_size = [part for part in parts if len(part)], vocab_size
        self.ends = np.cumsum([len(part) for part in self.parts], dtype=np.int64)
        self.maps: OrderedDict[int, np.ndarray] = OrderedDict()  # the one read last at the end
        self.bytes_mapped = 0

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.parts else 0

    def take(self, starts: np.ndarray, length: int) -> np.ndarray:
        """`length` ids from each of `starts` on, (m,) -> (m, length) int64; UserError for one beyond the vocabulary."""
        out = np.empty((len(starts), length), np.int64)
        first = np.searchsorted(self.ends, starts, side="right")
        for row, start, part in zip(out, np.asarray(starts).tolist(), first.tolist(), strict=True):
            self._fill(row, start, part)
        self._release(len(starts) * (PAGES + 4 * length))
        if self.vocab_size is not None and out.size and (largest := int(out.max())) >= self.vocab_size:
            row, column = np.unravel_index(out.argmax(), out.shape)
            raise UserError(
                f"{self.where(int(starts[row]) + int(column))} is id {largest}, but the vocabulary has "
                f"{self.vocab_size}; choose the tokenizer that made the file"
            )
        return out

    def _fill(self, row: np.ndarray, start: int, part: int) -> None:
        """One row, which may reach over several parts."""
        filled = 0
        while filled < len(row):
            begin = start + filled - (int(self.ends[part - 1]) if part else 0)
            ids = self._array(part)[begin : begin + len(row) - filled]
            row[filled : filled + len(ids)] = ids
            filled, part = filled + len(ids), part + 1

    def _array(self, part: int) -> np.ndarray:
        shard = self.parts[part]
        if not isinstance(shard, ShardFile):
            return shard
        if part not in self.maps:
            self.maps[part] = shard.map()
            if len(self.maps) > MAPPED_FILES:
                self.maps.popitem(last=False)
        self.maps.move_to_end(part)
        return self.maps[part]

    def _release(self, n_bytes: int) -> None:
        self.bytes_mapped += n_bytes
        if self.bytes_mapped >= MAPPED_BYTES:
            self.maps.clear()
            self.bytes_mapped = 0

    def where(self, position: int) -> str:
        """The file and the place in it of the id at `position`."""
        part = int(np.searchsorted(self.ends, position, side="right"))
        within = position - (int(self.ends[part - 1]) if part else 0)
        shard = self.parts[part]
        return f"{shard.path}, token {within:,}" if isinstance(shard, ShardFile) else f"token {position:,}"

    def chunks(self, size: int = 2**20):
        """All ids in order, in arrays of at most `size`."""
        for start in range(0, len(self), size):
            yield self.take(np.array([start]), min(size, len(self) - start))[0]


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id below `vocab_size`."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def as_shards(tokens: Shards | np.ndarray) -> Shards:
    return tokens if isinstance(tokens, Shards) else Shards([tokens])


def foreign_shard(path: Path, vocab_size: int) -> ShardFile:
    """A token file of nanoGPT or llm.c, by its header; UserError where it is cut off, or of an unknown version.

    Without a header its ids are of the smallest type that holds `vocab_size` of them.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        header = np.frombuffer(file.read(12).ljust(12, b"\0"), np.int32)
    magic, version, count = header.tolist()
    if magic not in HEADERS:
        dtype = token_dtype(vocab_size)
        if size % dtype.itemsize:
            raise UserError(f"{path} has {size:,} bytes, which is no number of {dtype} ids; it is cut off, or none")
        shard = ShardFile(path, dtype, size // dtype.itemsize)
        head = shard.map()[:END_BYTES] if shard.count > 1 else np.ones(2)
        if dtype == np.uint16 and head[::2].any() and not head[1::2].any():
            raise UserError(f"{path} looks as if its ids were uint32, and those of {vocab_size} words are uint16")
        return shard
    known, dtype = HEADERS[magic]
    if version != known:
        raise UserError(f"{path} has magic {magic} and version {version}, and only version {known} is known")
    if size != HEADER_BYTES + count * dtype.itemsize:
        raise UserError(
            f"{path} has {size:,} bytes, and its header speaks of {count:,} tokens, which are "
            f"{HEADER_BYTES + count * dtype.itemsize:,}; it is cut off, copy it again"
        )
    return ShardFile(path, dtype, count, HEADER_BYTES)


def ends_sha256(path: Path) -> str:
    """Hash of the first and last END_BYTES: what tells a file from another of its size without reading it."""
    with open(path, "rb") as file:
        head = file.read(END_BYTES)
        file.seek(max(0, path.stat().st_size - END_BYTES))
        return hashlib.sha256(head + file.read()).hexdigest()


def whole_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
