"""What all kernels share of eager PyTorch, Triton or not."""

import torch

PLAIN = {torch.Tensor, torch.nn.Parameter}
"""The classes of tensors whose memory a kernel may read."""


def eager_apply(function):
    """An autograd.Function's `apply` without its Python half, which takes as long as three allocations.

    That half prepares arguments for torch.func's transforms, and no kernel takes part in those.
    """
    return super(torch.autograd.Function, function).apply
