"""The dtype policy, equal for every norm and every backend, with autocast on and off."""

import pytest
import torch

from model.config import Kernels, NormConfig, NormKind
from model.norm import NORMS, build_norm

BACKENDS = [Kernels.torch, Kernels.plain, Kernels.triton, Kernels.cpu]


def test_every_kind_has_its_class():
    assert set(NORMS) == set(NormKind)


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("kind", NormKind)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_output_has_the_inputs_dtype_and_float32_accuracy(kernels, kind, autocast, dtype):
    norm = build_norm(64, NormConfig(kind=kind), bias=False, kernels=kernels)
    x = (10 + torch.randn(4, 64, generator=torch.Generator().manual_seed(0))).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y, _ = norm(x)
    assert y.dtype == dtype
    exact = build_norm(64, NormConfig(kind=kind), bias=False, kernels=Kernels.plain)(x.double())[0]
    # one rounding to the output's dtype (Triton's interpreter truncates to bfloat16, which is up to two of them), and
    # float32's own: x - mean(x) loses what x holds beyond float32
    rounding = 2 * torch.finfo(dtype).eps * exact.abs().max() + 2 * torch.finfo(torch.float32).eps * x.abs().max()
    assert (y.double() - exact).abs().max() <= rounding


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("kind", [kind for kind in NormKind if kind != NormKind.identity])
def test_zero_centered_gain(kernels, kind):
    x = torch.randn(4, 64)
    plain, centered = (
        build_norm(64, NormConfig(kind=kind, zero_centered=z), bias=True, kernels=kernels) for z in (False, True)
    )
    assert torch.equal(centered.weight, torch.zeros(64))
    assert torch.allclose(plain(x)[0], centered(x)[0], atol=1e-6)
    with torch.no_grad():
        plain.weight += 0.5
        centered.weight += 0.5
    assert torch.allclose(plain(x)[0], centered(x)[0], atol=1e-6)


@pytest.mark.parametrize("kind", NormKind)
def test_bias_belongs_to_layernorm(kind):
    norm = build_norm(8, NormConfig(kind=kind), bias=True, kernels=Kernels.torch)
    assert (getattr(norm, "bias", None) is not None) == (kind == NormKind.layernorm)


def test_identity_is_no_norm():
    norm = build_norm(8, NormConfig(kind=NormKind.identity), bias=True, kernels=Kernels.torch)
    x, branch = torch.randn(2, 8), torch.randn(2, 8)
    assert list(norm.parameters()) == []
    assert all(torch.equal(t, x) for t in norm(x))
    assert all(torch.equal(t, x + branch) for t in norm(x, branch))
