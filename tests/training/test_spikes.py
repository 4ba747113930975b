"""Spikes: the rule against plain numpy, and what a step that stands out does not touch."""

import numpy as np
import pytest
import torch

from tests.training.test_optim import backward, model
from training.config import OptimConfig
from training.optim import AdamW, guarded_update
from training.spikes import WINDOW, Spikes


def test_equals_the_rule_in_numpy():
    rng = np.random.default_rng(0)
    losses, norms = 3 + 0.1 * rng.standard_normal(400), 1 + 0.2 * rng.standard_normal(400)
    losses[[10, 63, 64, 200]] = 9
    norms[[5, 130, 399]] = 7
    spikes, found = Spikes(4.0, torch.device("cpu"), stop=False), []
    for step, now in enumerate(zip(losses, norms, strict=True)):
        expected = False
        if step >= WINDOW // 2:
            before = np.array([losses[:step], norms[:step]])[:, -WINDOW:]
            expected = bool((np.array(now) > before.mean(1) + 4.0 * before.std(1, ddof=1)).any())
        assert bool(spikes.stands_out(*(torch.tensor(x, dtype=torch.float32) for x in now))) == expected, step
        found += [step] if expected else []
    assert {64, 130, 200, 399} <= set(found)
    assert min(found) >= WINDOW // 2


@pytest.mark.parametrize("stop", [False, True])
def test_the_update_of_a_spike_is_left_out(stop):
    m = model()
    optimizer, spikes = AdamW(m, OptimConfig()), Spikes(6.0, torch.device("cpu"), stop=stop)
    for step in range(70):
        guarded_update(optimizer, loss=backward(m, step), lr=1e-4, clip=1.0, spikes=spikes)
    before = [p.detach().clone() for p in m.parameters()]
    moments = [s["exp_avg"].clone() for s in optimizer.state.values()]
    guarded_update(optimizer, loss=backward(m, 70) * 1e3, lr=1e-4, clip=1.0, spikes=spikes)
    assert spikes.latest == 1
    assert optimizer.found_inf == stop
    assert all(torch.equal(p, q) for p, q in zip(m.parameters(), before, strict=True))
    assert all(torch.equal(s["exp_avg"], q) for s, q in zip(optimizer.state.values(), moments, strict=True))
    guarded_update(optimizer, loss=backward(m, 71), lr=1e-4, clip=1.0, spikes=spikes)
    assert all(torch.equal(p, q) == stop for p, q in zip(m.parameters(), before, strict=True))


def test_a_loss_that_is_not_finite_is_no_spike_to_skip():
    m = model()
    optimizer, spikes = AdamW(m, OptimConfig()), Spikes(6.0, torch.device("cpu"), stop=False)
    guarded_update(optimizer, loss=backward(m, 0) * torch.nan, lr=1e-4, clip=1.0, spikes=spikes)
    assert optimizer.found_inf == 1
