"""Batches that are read ahead are those that are asked for."""

import threading

import numpy as np
import pytest
import torch

from training.feed import Feed


@pytest.fixture
def read():
    """What was read, and whether another thread did."""
    return []


@pytest.fixture
def batches(read):
    def of(step, rank, size):
        assert (rank, size) == (0, 1)
        read.append((step, threading.current_thread() is not threading.main_thread()))
        if step == 9:
            raise OSError("the file has gone")
        return np.full((2, 3), step), np.full((2, 3), -step)

    return of


@pytest.fixture
def gpu_like(monkeypatch, batches):
    """A feed that reads ahead as for a GPU, with no GPU."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    feed = Feed(batches, torch.device("cuda"))
    feed.device = torch.device("cpu")
    yield feed
    feed.thread.shutdown()


def test_nothing_is_read_ahead_on_a_cpu(batches, read):
    x, y = Feed(batches, torch.device("cpu"))(3)
    assert (x.tolist(), y.tolist()) == ([[3] * 3] * 2, [[-3] * 3] * 2)
    assert read == [(3, False)]


def test_the_next_batch_is_read_by_a_thread_and_no_batch_twice(gpu_like, read):
    for step in (0, 1, 2):
        x, y = gpu_like(step)
        assert (x[0, 0], y[0, 0]) == (step, -step)
    gpu_like.thread.shutdown()
    assert read == [(0, True), (1, True), (2, True), (3, True)]


def test_a_step_out_of_turn_gets_its_own_batch(gpu_like):
    assert [gpu_like(step)[0][0, 0].item() for step in (0, 5, 6, 2)] == [0, 5, 6, 2]


def test_an_error_comes_with_the_step_whose_batch_it_is(gpu_like):
    assert gpu_like(8)[0][0, 0] == 8
    with pytest.raises(OSError, match="gone"):
        gpu_like(9)
