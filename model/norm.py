"""The norms, by name, and the dtype policy that holds for all of them.

Policy: statistics and gain in float32 (float64 for float64 input), output in the input's dtype, autocast off inside.
torch's own autocast treats layer_norm and rms_norm differently, and has changed its mind between versions; a
comparison of the two must not inherit that.
"""

import importlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import Kernels, NormConfig, NormKind


def _gain(weight: Tensor | None, zero_centered: bool) -> Tensor | None:
    return weight if weight is None or not zero_centered else 1 + weight


def _in_float32(norm: Callable[..., Tensor], x: Tensor, *gains: Tensor | None) -> Tensor:
    """`norm` of x and its gains in float32 or wider, the result in x.dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        return norm(x.to(wide), *(g if g is None else g.to(wide) for g in gains)).to(x.dtype)


def torch_rms_norm(x, weight=None, eps=1e-5, *, zero_centered=False):
    """`torch.nn.functional.rms_norm` under the policy."""
    return _in_float32(lambda x, w: F.rms_norm(x, x.shape[-1:], w, eps), x, _gain(weight, zero_centered))


def torch_layer_norm(x, weight=None, bias=None, eps=1e-5, *, zero_centered=False):
    """`torch.nn.functional.layer_norm` under the policy."""
    return _in_float32(lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, eps), x, _gain(weight, zero_centered), bias)


# backend: (module, name of rms_norm, name of layer_norm); Triton's module is imported only when it is chosen
BACKENDS = {
    Kernels.triton: ("kernels", "rms_norm", "layer_norm"),
    Kernels.torch: ("model.norm", "torch_rms_norm", "torch_layer_norm"),
    Kernels.plain: ("kernels.reference", "rms_norm", "layer_norm"),
}


def _backend(kernels: Kernels) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    module, rms_norm, layer_norm = BACKENDS[kernels]
    functions = importlib.import_module(module)
    return getattr(functions, rms_norm), getattr(functions, layer_norm)


class Norm(nn.Module):
    """A gain per channel, (n_embd,); subclasses say what is divided out before it. (..., n_embd) -> the same shape."""

    def __init__(self, n_embd: int, eps: float, *, bias: bool, zero_centered: bool, kernels: Kernels):
        super().__init__()
        self.eps, self.zero_centered = eps, zero_centered
        self.weight = nn.Parameter(torch.zeros(n_embd) if zero_centered else torch.ones(n_embd))
        self.rms_norm, self.layer_norm = _backend(kernels)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}, zero_centered={self.zero_centered}"


class RMSNorm(Norm):
    """y = x / sqrt(mean(x²) + eps) · g (Zhang & Sennrich 2019)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.rms_norm(x, self.weight, self.eps, zero_centered=self.zero_centered)


class LayerNorm(Norm):
    """y = (x - mean(x)) / sqrt(var(x) + eps) · g [+ b] (Ba et al. 2016)."""

    def __init__(self, n_embd: int, eps: float, *, bias: bool, zero_centered: bool, kernels: Kernels):
        super().__init__(n_embd, eps, bias=bias, zero_centered=zero_centered, kernels=kernels)
        self.bias = nn.Parameter(torch.zeros(n_embd)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.layer_norm(x, self.weight, self.bias, self.eps, zero_centered=self.zero_centered)


NORMS = {NormKind.layernorm: LayerNorm, NormKind.rmsnorm: RMSNorm}


def build_norm(n_embd: int, norm: NormConfig, *, bias: bool, kernels: Kernels) -> Norm:
    return NORMS[norm.kind](n_embd, norm.eps, bias=bias, zero_centered=norm.zero_centered, kernels=kernels)
