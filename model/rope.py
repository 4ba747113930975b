"""Rotary position embedding (Su et al. 2021, eq. 34): the table; `rope` of `kernels` turns with it."""

import torch
from torch import Tensor


def rope_table(block_size: int, head_width: int, theta: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """cos and sin of t·theta^(-2i/D), both (T, D/2), float32; angles in float64, since float32 is off at large t."""
    frequency = theta ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angle = torch.outer(torch.arange(block_size, dtype=torch.float64), frequency)
    return angle.cos().float(), angle.sin().float()
