"""Parameter groups, the guarded update against plain AdamW, and what a non-finite gradient must not reach."""

import pytest
import torch
from torch import nn

from training.config import OptimConfig
from training.optim import AdamW, guarded_update, parameter_groups


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 1))


def test_gains_and_biases_are_not_decayed_unless_asked():
    m = model()
    decayed, rest = parameter_groups(m, OptimConfig())
    assert [p.ndim for p in decayed["params"]] == [2, 2]
    assert {p.ndim for p in rest["params"]} == {1}
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    everything, nothing = parameter_groups(m, OptimConfig(decay_gains=True))
    assert len(everything["params"]) == 6
    assert nothing["params"] == []
    AdamW(m, OptimConfig(decay_gains=True))


def backward(m: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
    loss = m(x).square().mean()
    loss.backward()
    return loss.detach()


def test_equals_plain_adamw_with_clipping():
    ours, theirs, cfg = model(), model(), OptimConfig(lr=0.1)
    optimizer = AdamW(ours, cfg)
    groups = parameter_groups(theirs, cfg)
    plain = torch.optim.AdamW(groups, lr=0.1, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=False, foreach=False)
    for step in range(5):
        loss = backward(ours, step)
        norm = guarded_update(optimizer, loss=loss, lr=0.1, clip=0.5)
        backward(theirs, step)
        assert nn.utils.clip_grad_norm_(theirs.parameters(), 0.5).item() == pytest.approx(norm.item(), rel=1e-5)
        plain.step()
        plain.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_non_finite_step_and_all_after_it_change_nothing(bad, where):
    m = model()
    optimizer = AdamW(m, OptimConfig())
    guarded_update(optimizer, loss=backward(m, 0), lr=0.1, clip=1.0)
    before = [p.detach().clone() for p in m.parameters()]
    moments = [s["exp_avg"].clone() for s in optimizer.state.values()]
    loss = backward(m, 1)
    if where == "gradient":
        m[0].weight.grad[0, 0] = bad
    guarded_update(optimizer, loss=loss * (bad if where == "loss" else 1), lr=0.1, clip=1.0)
    guarded_update(optimizer, loss=backward(m, 2), lr=0.1, clip=1.0)
    assert optimizer.found_inf == 1
    for p, q in zip(m.parameters(), before, strict=True):
        assert torch.equal(p, q)
    for s, q in zip(optimizer.state.values(), moments, strict=True):
        assert torch.equal(s["exp_avg"], q)
        assert s["step"] == 1


def test_clip_0_leaves_the_gradient_alone():
    free, wide, tight = model(), model(), model()
    for m, clip in ((free, 0.0), (wide, 1e9), (tight, 1e-3)):
        optimizer = AdamW(m, OptimConfig())
        for step in range(2):  # Adam's first update does not depend on the gradient's size
            assert guarded_update(optimizer, loss=backward(m, step) * (1 + step), lr=0.1, clip=clip) > 0
    assert all(torch.equal(a, b) for a, b in zip(free.parameters(), wide.parameters(), strict=True))
    assert not torch.equal(free[0].weight, tight[0].weight)
