"""Initial weights that do not depend on what else the model contains.

Each parameter is drawn from a generator of its own, keyed by (seed, parameter name), on the CPU in float32, and scaled
after the draw. So two variants share every common parameter bit for bit, on every device and for every depth.
"""

import hashlib
import math

import torch
from torch import Tensor, nn

STD = 0.02
RESIDUAL_OUTPUTS = ("attention.out.weight", "mlp.down.weight")


def keyed_generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def init_std(name: str, n_layer: int) -> float:
    """0.02, and 0.02/sqrt(2 n_layer) where a branch enters the stream (GPT-2, Radford et al. 2019, section 2.3)."""
    return STD / math.sqrt(2 * n_layer) if name.endswith(RESIDUAL_OUTPUTS) else STD


@torch.no_grad()
def init_weights(model: nn.Module, *, seed: int, n_layer: int) -> None:
    """Draws matrices from a normal distribution; gains stay as their norm made them, biases at zero."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue  # a model that is only counted
        if parameter.ndim >= 2:
            draw: Tensor = torch.randn(parameter.shape, generator=keyed_generator(seed, name))
            parameter.copy_(draw * init_std(name, n_layer))
        elif name.endswith("bias"):
            parameter.zero_()
