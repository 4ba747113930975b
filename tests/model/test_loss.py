"""The loss in chunks against the whole one and against float64, and what it holds in memory."""

import pytest
import torch
import torch.nn.functional as F

import model.loss
from model.loss import head_loss
from scripts.contestants import peak_mib
from tests.model.test_gpt import build, tokens


def draw(N=37, C=5, V=23, dtype=torch.float32, ignored=(3, 36)):
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(N, C, generator=g, dtype=dtype), torch.randn(V, C, generator=g, dtype=dtype)
    targets = torch.randint(V, (N,), generator=g)
    targets[list(ignored)] = -100
    return x.requires_grad_(), w.requires_grad_(), targets


def result(function, x, w, targets, upstream=-1.7):
    x, w = (t.detach().clone().requires_grad_() for t in (x, w))
    loss = function(x, w, targets)
    (upstream * loss).backward()
    return loss.detach(), x.grad, w.grad


def whole(x, w, targets):
    return F.cross_entropy(F.linear(x, w).float(), targets)


@pytest.mark.parametrize("n_rows", [1, 8, 32])
@pytest.mark.parametrize("ignored", [(), (3, 36), tuple(range(8))])
def test_chunks_are_as_near_to_the_truth_as_the_whole(monkeypatch, n_rows, ignored):
    x, w, targets = draw(ignored=ignored)
    truth = result(lambda x, w, t: F.cross_entropy(x @ w.T, t), x.double(), w.double(), targets)
    theirs = result(whole, x, w, targets)
    monkeypatch.setitem(model.loss.AT_ONCE, "cpu", n_rows * len(w))
    calls = count_chunks(monkeypatch)
    ours = result(head_loss, x, w, targets)
    assert calls == [n_rows]
    for a, b, true in zip(ours, theirs, truth, strict=True):
        assert (a - true).abs().max() <= 2 * (b - true).abs().max() + 1e-6 * true.abs().max()


def count_chunks(monkeypatch) -> list[int]:
    """The rows of a chunk, call by call."""
    calls, apply = [], model.loss._Chunked.apply
    monkeypatch.setattr(model.loss._Chunked, "apply", lambda *args: calls.append(args[4]) or apply(*args))
    return calls


def test_few_logits_are_taken_as_a_whole(monkeypatch):
    calls = count_chunks(monkeypatch)
    assert torch.equal(head_loss(*draw()), whole(*draw()))
    assert not calls


@pytest.mark.parametrize("n_rows", [8, 1000], ids=["chunks", "whole"])
@pytest.mark.parametrize("autocast", [False, True])
def test_padding_is_as_if_it_were_not_there(monkeypatch, n_rows, autocast):
    x, w, targets = draw(V=16)
    w = torch.cat([w, torch.full((7, 5), 50.0)]).detach()  # whose logits would be the highest
    monkeypatch.setitem(model.loss.AT_ONCE, "cpu", n_rows * len(w))
    calls = count_chunks(monkeypatch)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, dx, dw = result(lambda x, w, t: head_loss(x, w, t, 16), x, w, targets)
        expected = result(whole, x, w[:16], targets)
    assert bool(calls) == (n_rows == 8)
    rtol = 2e-2 if autocast else 1e-5
    torch.testing.assert_close(loss, expected[0], rtol=rtol, atol=0)
    torch.testing.assert_close(dx, expected[1], rtol=rtol, atol=rtol * 0.1)
    torch.testing.assert_close(dw[:16], expected[2], rtol=rtol, atol=rtol * 0.1)
    assert not dw[16:].any()
    assert torch.equal(head_loss(x, w, targets, len(w)), head_loss(x, w, targets))


def test_extreme_logits_stay_finite(monkeypatch):
    monkeypatch.setitem(model.loss.AT_ONCE, "cpu", 100)
    x, w, targets = draw()
    ours, theirs = result(head_loss, 1e4 * x, w, targets), result(whole, 1e4 * x, w, targets)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.isfinite(a).all()
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_autocast_gives_bfloat16_products_and_a_float32_loss(monkeypatch):
    x, w, targets = draw(N=64, C=32, V=50)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = result(whole, x, w, targets)
        monkeypatch.setitem(model.loss.AT_ONCE, "cpu", 400)
        ours = result(head_loss, x, w, targets)
    assert [t.dtype for t in ours] == [torch.float32] * 3
    assert torch.allclose(ours[0], theirs[0], rtol=1e-5)
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        assert (a - b).norm() < 0.01 * b.norm()


def test_chunks_change_no_step_of_a_model(monkeypatch):
    grads = []
    for at_once in (2**24, 40):
        monkeypatch.setitem(model.loss.AT_ONCE, "cpu", at_once)
        m = build(tie_embeddings=True)
        loss = m(tokens(), tokens())
        loss.backward()
        grads.append([loss.detach(), *(p.grad for p in m.parameters())])
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("gradients", [True, False])
def test_chunks_hold_less_than_the_logits(monkeypatch, gradients):
    N, V = 1024, 4096
    x, w, targets = draw(N=N, C=16, V=V)
    monkeypatch.setitem(model.loss.AT_ONCE, "cpu", N * V // 16)

    def step():
        with torch.set_grad_enabled(gradients):
            loss = head_loss(x, w, targets)
            if gradients:
                loss.backward()

    step()
    assert peak_mib(step, x.device) < 0.25 * 4 * N * V / 2**20


def test_no_gradient_is_computed_without_need(monkeypatch):
    monkeypatch.setitem(model.loss.AT_ONCE, "cpu", 100)
    x, w, targets = draw()
    with torch.no_grad():
        assert torch.allclose(head_loss(x, w, targets), whole(x, w, targets), rtol=1e-6)
