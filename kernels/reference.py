"""The plain twin of each kernel: same name, same signature, elementary torch operations only.

Every function computes in float32 (float64 for float64 input) and rounds once, to its input's dtype.
"""

import torch

# B batch, H query heads, Hkv key heads, T time, D head width, R rotated channels, N width of the normalised axis


def rms_norm(x, weight=None, eps=1e-5, *, zero_centered=False):
    """y = x / sqrt(mean(x²) + eps) · weight over the last axis (Zhang & Sennrich 2019, eq. 4).

    x (..., N), weight (N,) or None -> (..., N). Statistics and gain in float32 (float64 for float64 x), y in x.dtype.
    zero_centered: the gain is 1 + weight, added in that same precision.
    """
    h = _wide(x)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return _affine(h, weight, None, zero_centered).to(x.dtype)


def layer_norm(x, weight=None, bias=None, eps=1e-5, *, zero_centered=False):
    """y = (x - mean(x)) / sqrt(mean((x - mean(x))²) + eps) · weight + bias over the last axis (Ba et al. 2016, eq. 4).

    x (..., N), weight and bias (N,) or None -> (..., N). The variance is taken of the centred row, in a second pass.
    Statistics and gain in float32 (float64 for float64 x), y in x.dtype.
    zero_centered: the gain is 1 + weight, added in that same precision.
    """
    h = _wide(x)
    h = h - h.mean(-1, keepdim=True)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return _affine(h, weight, bias, zero_centered).to(x.dtype)


def add_rms_norm(x, residual, weight=None, eps=1e-5, *, zero_centered=False):
    """h = x + residual, rounded to the dtype torch gives it, and rms_norm(h) -> (y, h)."""
    h = x + residual
    return rms_norm(h, weight, eps, zero_centered=zero_centered), h


def add_layer_norm(x, residual, weight=None, bias=None, eps=1e-5, *, zero_centered=False):
    """h = x + residual, rounded to the dtype torch gives it, and layer_norm(h) -> (y, h)."""
    h = x + residual
    return layer_norm(h, weight, bias, eps, zero_centered=zero_centered), h


def swiglu(gate, up):
    """y = gate · sigmoid(gate) · up (Shazeer 2020, eq. 6, without its matrix products).

    gate and up of one shape -> that shape. Computed in float32 (float64 for float64 gate), y in gate.dtype.
    """
    g = _wide(gate)
    return (torch.nn.functional.silu(g) * up.to(g.dtype)).to(gate.dtype)


def rope(q, k, cos, sin):
    """Turn channel pair (i, i + R/2) of position t by the angle whose cosine and sine are cos[t, i] and sin[t, i].

    q (B, H, T, D), k (B, Hkv, T, D), cos and sin (T, R/2), R <= D even -> (q, k) of the same shapes.
    The first R channels turn, paired by halves as in Llama; the rest pass unchanged (Su et al. 2021, eq. 34).
    Computed in float32 (float64 for float64 input), returned in the dtypes of q and k.
    """
    return _turn(q, cos, sin), _turn(k, cos, sin)


def _turn(t, cos, sin):
    half = cos.shape[-1]
    first, second, rest = t.split([half, half, t.shape[-1] - 2 * half], dim=-1)
    a, b = _wide(first), _wide(second)
    cos, sin = cos.to(a.dtype), sin.to(a.dtype)
    return torch.cat([(a * cos - b * sin).to(t.dtype), (b * cos + a * sin).to(t.dtype), rest], dim=-1)


def _affine(h, weight, bias, zero_centered):
    if weight is not None:
        gain = weight.to(h.dtype)
        h = h * (1 + gain if zero_centered else gain)
    return h if bias is None else h + bias.to(h.dtype)


def _wide(t):
    return t.to(torch.float64 if t.dtype == torch.float64 else torch.float32)
