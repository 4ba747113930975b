"""Token ids to batches: training batches addressed by step number, and fixed validation blocks.

B batch, T block_size, n tokens in the split. A block is T+1 ids: x its first T, y its last T.
"""

import hashlib
from collections.abc import Callable

import numpy as np

from data.shards import Shards, as_shards
from errors import UserError

MASK = 2**64 - 1
FEISTEL_ROUNDS = 6
# The purposes for which keys are drawn from a seed.
ORDER, OFFSET = 1, 2
IGNORED_TARGET = -100
HASHED_STEPS = (0, 1, 100)
AHEAD = 64


def mix64(x):
    """splitmix64's finaliser (Steele, Lea & Flood 2014), for an int or a uint64 array."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def derive_key(*parts: int) -> int:
    """A 64-bit key that depends on every part and on their order."""
    key = 0
    for part in parts:
        key = mix64(key ^ (int(part) & MASK))
    return key


def keyed_permutation(n: int, key: int) -> Callable[[np.ndarray], np.ndarray]:
    """A bijection of range(n) chosen by `key`, for int64 arrays (m,) -> (m,), pointwise, in O(1) memory beyond them.

    A balanced Feistel network permutes the next power of four; an image outside range(n) is permuted again until
    it falls inside (Black & Rogaway, Ciphers with Arbitrary Finite Domains, 2002, "cycle-walking"). The power is
    below 4n, so that takes fewer than four turns on average. n may be up to 2**62.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)  # bits
    low = (1 << half) - 1
    round_keys = [derive_key(key, i) for i in range(FEISTEL_ROUNDS)]

    def shuffle(x: np.ndarray) -> np.ndarray:
        left, right = x >> half, x & low
        for round_key in round_keys:
            left, right = right, left ^ (mix64(right ^ round_key) & low)
        return left << half | right

    def permute(indices: np.ndarray) -> np.ndarray:
        out = shuffle(np.asarray(indices).astype(np.uint64))
        while (outside := out >= n).any():
            out[outside] = shuffle(out[outside])
        return out.astype(np.int64)

    return permute


class TrainBatches:
    """`batches(step) -> (x, y)`, int64 (B, T) each; the batch depends on (seed, step) alone.

    `batches(step, rank, size)` gives the rows of one of `size` processes, which together have the batch.
    Each epoch lays blocks end to end from an offset of its own, and visits each block once, in an order of its own.
    A batch may span epochs. Raises UserError if the split is shorter than one block.
    """

    def __init__(self, tokens: Shards | np.ndarray, *, block_size: int, batch_size: int, seed: int):
        require_a_block(tokens, block_size, "train")
        self.tokens = as_shards(tokens)
        self.block_size, self.batch_size, self.seed = block_size, batch_size, seed
        # One block fewer than would fit, where possible: the slack lets the block borders move by up to a block.
        self.n_blocks = max(1, (len(tokens) - block_size) // block_size)
        self.slack = len(tokens) - 1 - self.n_blocks * block_size
        self.ahead: tuple[int, np.ndarray] | None = None

    def __call__(self, step: int, rank: int = 0, size: int = 1) -> tuple[np.ndarray, np.ndarray]:
        each = self.batch_size // size
        return gather(self.tokens, self.starts_of(step)[rank * each : (rank + 1) * each], self.block_size)

    def starts_of(self, step: int) -> np.ndarray:
        """First tokens of a step's blocks, (B,); found for AHEAD steps at once, which takes little longer than one."""
        window = step // AHEAD
        if self.ahead is None or self.ahead[0] != window:
            sequences = np.arange(window * AHEAD * self.batch_size, (window + 1) * AHEAD * self.batch_size)
            self.ahead = window, self.starts(sequences).reshape(AHEAD, self.batch_size)
        return self.ahead[1][step % AHEAD]

    def hashes(self) -> dict[int, str]:
        """Of some batches, by step: by them one sees whether two runs had the same."""
        return {step: batch_hash(*self(step)) for step in HASHED_STEPS}

    def go_to(self, step: int, positions: list) -> None:
        """Nothing to do: a batch is known by its step."""

    def position(self, step: int) -> list:
        """What a checkpoint has to hold beside the step, to find its batch again."""
        return []

    def starts(self, sequences: np.ndarray) -> np.ndarray:
        """First token of each block, (m,), for sequence numbers counted over all steps, (m,)."""
        epochs, indices = np.divmod(sequences, self.n_blocks)
        starts = np.empty_like(indices)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            order = keyed_permutation(self.n_blocks, derive_key(self.seed, epoch, ORDER))
            offset = derive_key(self.seed, epoch, OFFSET) % (self.slack + 1)
            starts[here] = offset + self.block_size * order(indices[here])
        return starts


def eval_blocks(tokens: Shards | np.ndarray, *, block_size: int, n_tokens: int | None) -> tuple[np.ndarray, np.ndarray]:
    """A fixed set of validation blocks (x, y), int64 (n_blocks, T) each, that share no target.

    n_tokens=None takes the whole split: each of the n - 1 targets once, the last block filled up with x = 0 and
    y = -100. Else ceil(n_tokens / T) full blocks evenly spread from the first token to the last, or the whole split if
    it has fewer. Raises UserError if the split is shorter than one block.
    """
    require_a_block(tokens, block_size, "val")
    assert n_tokens is None or n_tokens > 0
    tokens = as_shards(tokens)
    targets = len(tokens) - 1
    wanted = targets if n_tokens is None else -(-n_tokens // block_size)
    if n_tokens is None or wanted > targets // block_size:
        return whole_split(tokens, block_size)
    starts = np.arange(wanted) * (targets - block_size) // max(1, wanted - 1)
    return gather(tokens, starts, block_size)


def whole_split(tokens: Shards, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    n_blocks = -(-(len(tokens) - 1) // block_size)
    x = np.zeros((n_blocks, block_size), np.int64)
    y = np.full((n_blocks, block_size), IGNORED_TARGET, np.int64)
    ids = tokens.take(np.array([0]), len(tokens))[0]
    x.flat[: len(ids) - 1] = ids[:-1]
    y.flat[: len(ids) - 1] = ids[1:]
    return x, y


def gather(tokens: Shards, starts: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    blocks = tokens.take(starts, block_size + 1)  # (m, T+1)
    return np.ascontiguousarray(blocks[:, :-1]), np.ascontiguousarray(blocks[:, 1:])


def require_a_block(tokens: Shards | np.ndarray, block_size: int, split: str) -> None:
    if len(tokens) < block_size + 1:
        raise UserError(
            f"the {split} split has {len(tokens)} tokens, but block_size={block_size} needs at least {block_size + 1}; "
            f"give more text or a smaller block_size"
        )


def batch_hash(x: np.ndarray, y: np.ndarray) -> str:
    """16 hex digits that tell whether two batches are the same."""
    digest = hashlib.sha256()
    for array in (x, y):
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()[:16]
