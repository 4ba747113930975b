"""The plain twins against torch's own functions and, for RoPE, against complex numbers; all in float64."""

import pytest
import torch
import torch.nn.functional as F

from kernels import reference

SHAPES = [(4,), (1, 1), (3, 37), (2, 3, 100), (0, 8)]


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_norms_equal_torchs(shape):
    x, weight, bias = draw(*shape), draw(shape[-1], seed=1), draw(shape[-1], seed=2)
    n = shape[-1:]
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-3), F.rms_norm(x, n, weight, 1e-3))
    torch.testing.assert_close(reference.layer_norm(x, weight, bias, 1e-3), F.layer_norm(x, n, weight, bias, 1e-3))
    torch.testing.assert_close(reference.rms_norm(x), F.rms_norm(x, n, eps=1e-5))
    torch.testing.assert_close(reference.layer_norm(x), F.layer_norm(x, n))
    torch.testing.assert_close(reference.layer_norm(x, None, bias), F.layer_norm(x, n) + bias)


def test_zero_centered_adds_one_to_the_gain():
    x, weight, bias = draw(3, 37), draw(37, seed=1), draw(37, seed=2)
    torch.testing.assert_close(
        reference.rms_norm(x, weight, zero_centered=True), F.rms_norm(x, (37,), 1 + weight, 1e-5)
    )
    torch.testing.assert_close(
        reference.layer_norm(x, weight, bias, zero_centered=True), F.layer_norm(x, (37,), 1 + weight, bias)
    )
    torch.testing.assert_close(reference.rms_norm(x, zero_centered=True), reference.rms_norm(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_round_once(dtype):
    """Gains near 1 that the low precision could not hold, and a mean that its statistics could not remove."""
    x = (10 + 0.1 * draw(8, 64)).to(dtype)
    weight, bias = 1e-3 * draw(64, seed=1, dtype=torch.float32), draw(64, seed=2, dtype=torch.float32)
    for twin, parameters in ((reference.rms_norm, (weight,)), (reference.layer_norm, (weight, bias))):
        y = twin(x, *parameters, zero_centered=True)
        exact = twin(x.double(), *(p.double() for p in parameters), zero_centered=True)
        assert y.dtype == dtype
        # half a unit in the last place for the one rounding, the rest for float32
        assert ((y.double() - exact).abs() <= 0.51 * torch.finfo(dtype).eps * exact.abs() + 1e-4).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_swiglu_equals_torchs(dtype):
    gate, up = draw(2, 3, 8, dtype=dtype), draw(2, 3, 8, seed=1, dtype=dtype)
    y = reference.swiglu(gate, up)
    torch.testing.assert_close(y, (F.silu(gate.double()) * up.double()).to(dtype))


def angles(t, rotated):
    angle = torch.outer(torch.arange(t, dtype=torch.float64), 100.0 ** -torch.linspace(0, 1, rotated // 2).double())
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("rotated", [8, 4, 2])
def test_rope_is_a_complex_product(rotated):
    q, k = draw(2, 4, 5, 8), draw(2, 2, 5, 8, seed=1)
    cos, sin = angles(5, rotated)
    for t, turned in zip((q, k), reference.rope(q, k, cos, sin), strict=True):
        first, second, rest = t.split([rotated // 2, rotated // 2, 8 - rotated], dim=-1)
        z = torch.complex(first, second) * torch.complex(cos, sin)
        torch.testing.assert_close(turned, torch.cat([z.real, z.imag, rest], dim=-1))


def test_rope_scores_depend_on_distance_alone():
    """One q and one k at every position: after turning, q·k is the same along each diagonal."""
    q, k = (draw(1, 1, 1, 8, seed=s).expand(1, 1, 6, 8) for s in (0, 1))
    q, k = reference.rope(q, k, *angles(6, 8))
    scores = (q @ k.mT)[0, 0]
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1])


def test_rope_computes_in_float32():
    q = draw(1, 2, 300, 8, dtype=torch.bfloat16)
    cos, sin = (t.float() for t in angles(300, 8))
    turned, _ = reference.rope(q, q, cos, sin)
    exact, _ = reference.rope(q.double(), q.double(), cos, sin)
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned, exact.bfloat16())


def test_twins_differentiate():
    x, weight, bias = (t.requires_grad_() for t in (draw(3, 6), draw(6, seed=1), draw(6, seed=2)))
    assert torch.autograd.gradcheck(reference.rms_norm, (x, weight))
    assert torch.autograd.gradcheck(reference.layer_norm, (x, weight, bias))
    assert torch.autograd.gradcheck(reference.swiglu, (x, draw(3, 6, seed=3).requires_grad_()))
    q = draw(1, 2, 3, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda q: reference.rope(q, q, *angles(3, 2)), (q,))
