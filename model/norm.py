"""The norms, by name, and the dtype policy that holds for all of them.

Policy: statistics and gain in float32 (float64 for float64 input), output in the input's dtype, autocast off inside.
torch's own autocast treats layer_norm and rms_norm differently, and has changed its mind between versions; a
comparison of the two must not inherit that.
"""

import importlib
from types import ModuleType

import torch
from torch import Tensor, nn

from model.config import Kernels, NormConfig, NormKind

# each has the six functions of `kernels`; Triton's is imported only when it is chosen
BACKENDS = {
    Kernels.triton: "kernels",
    Kernels.cpu: "kernels.cpu",
    Kernels.torch: "model.torch_ops",
    Kernels.plain: "kernels.reference",
}


def backend(kernels: Kernels) -> ModuleType:
    return importlib.import_module(BACKENDS[kernels])


class Norm(nn.Module):
    """norm(stream) -> (y, stream); norm(stream, branch) -> (y, h) with h = stream + branch and y the norm of h.

    All (..., n_embd). The gain is `weight`, (n_embd,); subclasses say what is divided out before it.
    """

    function: str  # its name in `kernels`

    def __init__(self, n_embd: int, eps: float, *, bias: bool, zero_centered: bool, kernels: Kernels):
        super().__init__()
        self.eps, self.zero_centered = eps, zero_centered
        self.weight = nn.Parameter(torch.zeros(n_embd) if zero_centered else torch.ones(n_embd))
        self.norm, self.add_norm = (getattr(backend(kernels), prefix + self.function) for prefix in ("", "add_"))

    def affine(self) -> tuple[Tensor | None, ...]:
        return (self.weight,)

    def forward(self, stream: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if branch is None:
            return self.norm(stream, *self.affine(), self.eps, zero_centered=self.zero_centered), stream
        return self.add_norm(branch, stream, *self.affine(), self.eps, zero_centered=self.zero_centered)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}, zero_centered={self.zero_centered}"


class RMSNorm(Norm):
    """y = h / sqrt(mean(h²) + eps) · g (Zhang & Sennrich 2019)."""

    function = "rms_norm"


class LayerNorm(Norm):
    """y = (h - mean(h)) / sqrt(var(h) + eps) · g [+ b] (Ba et al. 2016)."""

    function = "layer_norm"

    def __init__(self, n_embd: int, eps: float, *, bias: bool, zero_centered: bool, kernels: Kernels):
        super().__init__(n_embd, eps, bias=bias, zero_centered=zero_centered, kernels=kernels)
        self.bias = nn.Parameter(torch.zeros(n_embd)) if bias else None

    def affine(self) -> tuple[Tensor | None, ...]:
        return self.weight, self.bias


class Identity(nn.Module):
    """y = h: no norm at all, to see what one does and costs. Of the arguments it needs none."""

    def __init__(self, n_embd: int, eps: float, *, bias: bool, zero_centered: bool, kernels: Kernels):
        super().__init__()

    def forward(self, stream: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = stream if branch is None else stream + branch
        return h, h


NORMS = {NormKind.layernorm: LayerNorm, NormKind.rmsnorm: RMSNorm, NormKind.identity: Identity}


def build_norm(n_embd: int, norm: NormConfig, *, bias: bool, kernels: Kernels) -> Norm | Identity:
    return NORMS[norm.kind](n_embd, norm.eps, bias=bias, zero_centered=norm.zero_centered, kernels=kernels)
