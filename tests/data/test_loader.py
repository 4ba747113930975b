import numpy as np
import pytest

from data.loader import TrainBatches, batch_hash, derive_key, eval_blocks, keyed_permutation, mix64
from errors import UserError

T = 8
LENGTHS = [T + 1, T + 2, 2 * T - 1, 2 * T, 2 * T + 1, 3 * T - 1, 3 * T, 3 * T + 1, 10 * T + 5, 100 * T]


def positions(n: int) -> np.ndarray:
    """A split whose token ids are their own positions."""
    return np.arange(n, dtype=np.uint32)


def train_batches(n: int, batch_size: int = 1, seed: int = 0) -> TrainBatches:
    return TrainBatches(positions(n), block_size=T, batch_size=batch_size, seed=seed)


@pytest.mark.parametrize("n", [*range(1, 70), 255, 256, 257, 1000, 4096, 4097, 65_537])
def test_permutation_is_a_bijection(n):
    for key in (0, 1, 2**63 + 12345):
        np.testing.assert_array_equal(np.sort(keyed_permutation(n, key)(np.arange(n))), np.arange(n))


def test_permutation_is_pointwise():
    permute = keyed_permutation(1000, 7)
    whole = permute(np.arange(1000))
    np.testing.assert_array_equal(permute(np.array([999, 3, 3])), whole[[999, 3, 3]])
    assert whole.dtype == np.int64


def test_permutation_serves_large_ranges():
    n = 2**40 - 87
    images = keyed_permutation(n, 3)(np.arange(n - 100_000, n))
    assert len(np.unique(images)) == 100_000
    assert images.min() >= 0
    assert images.max() < n
    # Uniform over the range: the mean of 100,000 draws has standard error n / sqrt(12 * 100,000).
    assert abs(images.mean() - n / 2) < 5 * n / np.sqrt(12 * 100_000)


def test_permutation_differs_by_key():
    orders = {tuple(keyed_permutation(20, key)(np.arange(20)).tolist()) for key in range(200)}
    assert len(orders) == 200


@pytest.mark.parametrize("n", [5, 16, 37])
def test_permutation_sends_an_index_everywhere_equally(n):
    images = np.array([keyed_permutation(n, derive_key(key))(np.arange(n)) for key in range(3000)])
    counts = np.stack([np.bincount(column, minlength=n) for column in images.T])
    expected = 3000 / n
    chi2_per_index = ((counts - expected) ** 2 / expected).sum(1) / (n - 1)
    assert chi2_per_index.max() < 1 + 6 * np.sqrt(2 / (n - 1))


def test_mix64_agrees_for_ints_and_arrays():
    values = [0, 1, 2**32, 2**64 - 1]
    assert mix64(np.array(values, np.uint64)).tolist() == [mix64(value) for value in values]
    # First output of splitmix64 seeded with 0, from its reference implementation.
    assert mix64(0) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("n", LENGTHS)
def test_each_epoch_visits_each_block_once(n):
    batches = train_batches(n)
    for epoch in range(5):
        starts = np.sort(batches.starts(epoch * batches.n_blocks + np.arange(batches.n_blocks)))
        assert (np.diff(starts) == T).all()
        assert starts[0] >= 0
        assert starts[-1] + T + 1 <= n


@pytest.mark.parametrize("n", LENGTHS)
def test_no_token_is_starved(n):
    """Over many epochs every position is an input, and a target, save the ends that cannot be."""
    batches = train_batches(n, batch_size=batches_per_epoch(n) * 200)
    x, y = batches(0)
    assert set(x.flat) == set(range(n - 1))
    assert set(y.flat) == set(range(1, n))


def batches_per_epoch(n: int) -> int:
    return train_batches(n).n_blocks


def test_blocks_are_runs_of_the_split_shifted_by_one():
    x, y = train_batches(500, batch_size=6)(3)
    assert (x.shape, y.shape, x.dtype, y.dtype) == ((6, T), (6, T), np.int64, np.int64)
    np.testing.assert_array_equal(x, x[:, :1] + np.arange(T))
    np.testing.assert_array_equal(y, x + 1)


def test_a_batch_depends_on_seed_and_step_alone():
    first = train_batches(997, batch_size=5)
    forward = [batch_hash(*first(step)) for step in range(60)]
    again = train_batches(997, batch_size=5)
    backward = [batch_hash(*again(step)) for step in reversed(range(60))]
    assert forward == backward[::-1]
    assert len(set(forward)) == 60
    other = train_batches(997, batch_size=5, seed=1)
    assert not set(forward) & {batch_hash(*other(step)) for step in range(60)}


@pytest.mark.parametrize("batch_size", [1, 3, 7, 64])
def test_batch_size_cuts_one_sequence_of_blocks(batch_size):
    """Batches that span epochs, or several of them, lose and repeat nothing."""
    n = 12 * T
    one_by_one = np.concatenate([train_batches(n)(s)[0] for s in range(4 * batch_size)])
    together = np.concatenate([train_batches(n, batch_size)(step)[0] for step in range(4)])
    np.testing.assert_array_equal(together, one_by_one)


def test_epochs_differ_in_order_and_offset():
    batches = train_batches(40 * T)
    epochs = [batches.starts(e * batches.n_blocks + np.arange(batches.n_blocks)) for e in range(30)]
    assert len({int(starts.min()) for starts in epochs}) > T // 2
    assert len({tuple((starts // T).tolist()) for starts in epochs}) == 30


def test_a_late_step_costs_no_more():
    x, _ = train_batches(10_000, batch_size=4)(10**12)
    assert x.shape == (4, T)


@pytest.mark.parametrize("n", [0, 1, T])
def test_a_split_shorter_than_a_block_is_refused(n):
    with pytest.raises(UserError, match=rf"train split has {n} tokens, but block_size=8 needs at least 9"):
        train_batches(n)
    for n_tokens in (None, 4):
        with pytest.raises(UserError, match=rf"val split has {n} tokens, but block_size=8 needs at least 9"):
            eval_blocks(positions(n), block_size=T, n_tokens=n_tokens)


@pytest.mark.parametrize("n", LENGTHS)
def test_the_whole_split_has_every_target_once(n):
    x, y = eval_blocks(positions(n), block_size=T, n_tokens=None)
    assert x.shape == y.shape == (-(-(n - 1) // T), T)
    assert (x.dtype, y.dtype) == (np.int64, np.int64)
    kept = y != -100
    np.testing.assert_array_equal(y[kept], np.arange(1, n))
    np.testing.assert_array_equal(x[kept], np.arange(n - 1))
    assert (x[~kept] == 0).all()
    assert kept[:-1].all()


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("n_tokens", [1, T, T + 1, 5 * T, 10_000])
def test_some_of_the_split_is_spread_and_never_repeats(n, n_tokens):
    x, y = eval_blocks(positions(n), block_size=T, n_tokens=n_tokens)
    wanted, full = -(-n_tokens // T), (n - 1) // T
    if wanted > full:
        np.testing.assert_array_equal(y, eval_blocks(positions(n), block_size=T, n_tokens=None)[1])
        return
    assert len(x) == wanted
    np.testing.assert_array_equal(y, x + 1)
    assert len(np.unique(y)) == y.size
    if wanted > 1:
        assert (y[0, 0], y[-1, -1]) == (1, n - 1)
        gaps = np.diff(x[:, 0])
        assert gaps.max() - gaps.min() <= 1


def test_eval_blocks_are_fixed():
    hashes = {batch_hash(*eval_blocks(positions(500), block_size=T, n_tokens=100)) for _ in range(2)}
    assert len(hashes) == 1


def test_batch_hash_sees_values_order_and_shape():
    x = np.arange(6).reshape(2, 3)
    variants = [(x, x), (x, x + 1), (x + 1, x), (x[::-1], x), (x.reshape(3, 2), x), (x.astype(np.int32), x)]
    assert len({batch_hash(*variant) for variant in variants}) == len(variants)
    assert batch_hash(x, x) == batch_hash(np.asfortranarray(x), x.copy())
    assert len(batch_hash(x, x)) == 16


def test_a_step_out_of_its_turn_has_the_same_blocks():
    batches = train_batches(100 * T, batch_size=3)
    expected = {step: train_batches(100 * T, batch_size=3)(step)[0] for step in (0, 63, 64, 65, 1000, 10**9)}
    for step in (65, 0, 10**9, 64, 63, 1000, 0):
        np.testing.assert_array_equal(batches(step)[0], expected[step])
    sequences = np.arange(64 * 3, 65 * 3)
    np.testing.assert_array_equal(batches.starts_of(64), batches.starts(sequences))
