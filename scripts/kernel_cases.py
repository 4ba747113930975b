"""What the kernel scripts share: each kernel's inputs at one size, the bytes it cannot avoid, and its opponents."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from errors import UserError
from kernels import reference
from kernels.launch import INTERPRETED

# M rows, N columns; RoPE: M = B·T positions, N = H·D channels of q, with one head of k for each four of q

HEAD_WIDTH, MAX_TIME = 128, 2048
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _add_then(norm):
    def add_norm(x, residual, **parameters):
        h = x + residual
        return norm(h, **parameters), h

    return add_norm


def _rms_norm(x, weight):
    return F.rms_norm(x, x.shape[-1:], weight, 1e-5)


def _layer_norm(x, weight, bias=None):
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


# what one would write in PyTorch; the same, compiled, is the second opponent
TORCH = {
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "add_rms_norm": _add_then(_rms_norm),
    "add_layer_norm": _add_then(_layer_norm),
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "rope": reference.rope,
}
# module and function of liger-kernel, and how to call it; its RoPE works in place and is left out
LIGER = {
    "rms_norm": ("rms_norm", "LigerRMSNormFunction", lambda f, x, weight: f(x, weight, 1e-5, 0.0, "llama", False)),
    "layer_norm": ("layer_norm", "LigerLayerNormFunction", lambda f, x, weight, bias: f(x, weight, bias, 1e-5)),
    "add_rms_norm": (
        "fused_add_rms_norm",
        "LigerFusedAddRMSNormFunction",
        lambda f, x, residual, weight: f(x, residual, weight, 1e-5),
    ),
    "swiglu": ("swiglu", "LigerSiLUMulFunction", lambda f, gate, up: f(gate, up)),
}


def liger(name: str) -> Callable | None:
    """liger-kernel's function for a kernel; None where it has none, or is not installed."""
    if name not in LIGER:
        return None
    module, function, how = LIGER[name]
    try:
        apply = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function).apply
    except ImportError:
        return None
    return lambda **inputs: how(apply, **inputs)


def shape(n_rows: int, n_cols: int) -> tuple[int, int, int, int, int]:
    """B, T, H, Hkv, D of RoPE with B·T = M and H·D = N, as near as whole numbers come."""
    width, n_time = min(HEAD_WIDTH, n_cols) // 2 * 2, min(MAX_TIME, n_rows)
    heads = max(1, n_cols // width)
    return max(1, n_rows // n_time), n_time, heads, max(1, heads // 4), width


@dataclass(frozen=True)
class Case:
    """One kernel at one size. `bias` is LayerNorm's."""

    name: str
    n_rows: int
    n_cols: int
    dtype: str = "bf16"
    bias: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} with bias" if self.bias else self.name

    def inputs(self, device: str, seed: int = 0) -> dict[str, Tensor]:
        """Leaves that require a gradient, and RoPE's tables, which do not."""
        generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)
        dtype = DTYPES[self.dtype]

        def draw(*size):
            return torch.randn(size, generator=generator, device=device, dtype=dtype)

        def leaf(t):
            return t.detach().requires_grad_()

        M, N = self.n_rows, self.n_cols
        if self.name == "swiglu":
            gate, up = draw(M, 2 * N).chunk(2, dim=-1)
            return {"gate": leaf(gate), "up": leaf(up)}
        if self.name == "rope":
            B, T, H, Hkv, D = shape(M, N)
            packed = draw(B, T, (H + Hkv) * D).split([H * D, Hkv * D], dim=-1)
            q, k = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in packed)
            angle = torch.outer(
                torch.arange(T, device=device, dtype=torch.float32),
                10_000 ** -(torch.arange(0, D, 2, device=device, dtype=torch.float32) / D),
            )
            return {"q": leaf(q), "k": leaf(k), "cos": angle.cos(), "sin": angle.sin()}
        inputs = {"x": leaf(draw(M, N)), "weight": leaf(1 + 0.1 * draw(N))}
        if self.name.startswith("add_"):
            inputs["residual"] = leaf(draw(M, N))
        if self.bias:
            inputs["bias"] = leaf(0.1 * draw(N))
        return inputs

    def call(self, function: Callable, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        out = function(**inputs)
        return out if isinstance(out, tuple) else (out,)

    @property
    def fused(self) -> Callable:
        return getattr(kernels, self.name)

    def n_bytes(self, direction: str) -> int:
        """The least traffic: each tensor read or written once; not the partial sums of the gains' gradients."""
        size, itemsize = self.n_rows * self.n_cols, DTYPES[self.dtype].itemsize
        if self.name == "rope":
            B, T, H, Hkv, D = shape(self.n_rows, self.n_cols)
            return 2 * B * T * (H + Hkv) * D * itemsize + 4 * T * D
        tensors = TENSORS[self.name][direction]
        return tensors * size * itemsize


# how many (M, N) tensors are read and written
TENSORS = {
    "rms_norm": {"forward": 2, "backward": 3},
    "layer_norm": {"forward": 2, "backward": 3},
    "add_rms_norm": {"forward": 4, "backward": 4},
    "add_layer_norm": {"forward": 4, "backward": 4},
    "swiglu": {"forward": 3, "backward": 5},
}


def device() -> str:
    """Where the kernels can run here."""
    if torch.cuda.is_available():
        return "cuda"
    if INTERPRETED:
        return "cpu"
    raise UserError("without a GPU the kernels run on CPU tensors only under TRITON_INTERPRET=1: set it and run again")
