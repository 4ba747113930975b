"""Steps whose loss or gradient norm stands out from those before, told on the device, so that no step waits."""

import torch
from torch import Tensor

WINDOW = 128


class Spikes:
    """The losses and gradient norms of the newest WINDOW steps; `state` is all of it, for checkpoints.

    A step stands out where either lies more than `sigma` standard deviations above their mean, once half of them are
    there: the rule of OLMo-core's SkipStepOptimizer, with its window and its usual sigma of 6. Such a step's update is
    left out, and where `stop` is set all after it.
    """

    def __init__(self, sigma: float, device: torch.device, *, stop: bool):
        self.sigma, self.stop = sigma, stop
        self.newest = torch.zeros(2, WINDOW, device=device)
        self.n_seen = torch.zeros((), dtype=torch.int64, device=device)
        self.state = {"spikes.newest": self.newest, "spikes.n_seen": self.n_seen}

    def stands_out(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Whether this step does, shape () of float, 0 or 1; it counts for those that come."""
        now = torch.stack([loss, norm])
        n, held = self.n_seen.clamp(max=WINDOW), torch.arange(WINDOW, device=now.device) < self.n_seen
        mean = self.newest.sum(1) / n
        std = (((self.newest - mean[:, None]) ** 2 * held).sum(1) / (n - 1)).sqrt()
        out = (now > mean + self.sigma * std).any() & (self.n_seen >= WINDOW // 2)
        self.newest.index_copy_(1, (self.n_seen % WINDOW)[None], now[:, None])
        self.n_seen += 1
        self.latest = out.float()
        return self.latest
