"""Batches on the device, read while the device is at work on the one before."""

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from data.loader import TrainBatches
from training.distributed import ALONE, World


class Feed:
    """feed(step) -> (x, y), int64 (B / processes, T) each, this process's rows of the batch, on the device.

    For a GPU a thread reads the next step's batch meanwhile, into pinned memory, for which a copy need not wait. On a
    CPU it would take a core from the step, and nothing is read ahead.
    """

    def __init__(self, batches: TrainBatches, device: torch.device, world: World = ALONE):
        self.batches, self.device, self.share = batches, device, (world.rank, world.size)
        self.thread = ThreadPoolExecutor(1) if device.type == "cuda" else None
        self.ahead: tuple[int, Future] | None = None

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        if self.thread is None:
            return self.to_device(torch.from_numpy(tokens) for tokens in self.batches(step, *self.share))
        read = self.ahead[1] if self.ahead and self.ahead[0] == step else self.thread.submit(self.pinned, step)
        batch = self.to_device(read.result())
        self.ahead = step + 1, self.thread.submit(self.pinned, step + 1)
        return batch

    def pinned(self, step: int) -> list[Tensor]:
        return [torch.from_numpy(tokens).pin_memory() for tokens in self.batches(step, *self.share)]

    def to_device(self, batch) -> tuple[Tensor, Tensor]:
        x, y = (tokens.to(self.device, non_blocking=self.thread is not None) for tokens in batch)
        return x, y
