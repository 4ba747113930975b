"""PyTorch's own operators behind the names and signatures of `kernels`, under the dtype policy of `model.norm`."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.reference import rope, swiglu

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm", "rope", "swiglu"]


def _in_float32(norm: Callable[..., Tensor], x: Tensor, *gains: Tensor | None) -> Tensor:
    """`norm` of x and its gains in float32 or wider, the result in x.dtype; autocast has no say."""
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        return norm(x.to(wide), *(g if g is None else g.to(wide) for g in gains)).to(x.dtype)


def _gain(weight: Tensor | None, zero_centered: bool) -> Tensor | None:
    return weight if weight is None or not zero_centered else 1 + weight


def rms_norm(x, weight=None, eps=1e-5, *, zero_centered=False):
    return _in_float32(lambda x, w: F.rms_norm(x, x.shape[-1:], w, eps), x, _gain(weight, zero_centered))


def layer_norm(x, weight=None, bias=None, eps=1e-5, *, zero_centered=False):
    return _in_float32(lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, eps), x, _gain(weight, zero_centered), bias)


def add_rms_norm(x, residual, weight=None, eps=1e-5, *, zero_centered=False):
    h = x + residual
    return rms_norm(h, weight, eps, zero_centered=zero_centered), h


def add_layer_norm(x, residual, weight=None, bias=None, eps=1e-5, *, zero_centered=False):
    h = x + residual
    return layer_norm(h, weight, bias, eps, zero_centered=zero_centered), h
