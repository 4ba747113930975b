"""The loss of the head, whose logits are the largest tensor of all where the vocabulary is large."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

AT_ONCE = {"cpu": 2**24, "mps": 2**24, "cuda": 2**28}
"""Logits that are held at once, enough for whole matrix products: 64 MiB of float32 on a CPU, 1 GiB on a GPU."""


def head_loss(x: Tensor, weight: Tensor, targets: Tensor, n_vocab: int | None = None) -> Tensor:
    """Mean cross-entropy, in nats per token, of the logits x @ weight.T; targets of -100 do not count.

    x (N, C), weight (V, C), targets (N,) -> () in float32. Ids from n_vocab on are padding and have no probability.
    More logits than AT_ONCE are taken in chunks of rows, and their gradients with them, since all would be held three
    times. Compiled, they are held once.
    """
    at_once, padding = AT_ONCE[x.device.type], padding_logits(weight, n_vocab)
    if torch.compiler.is_compiling() or x.shape[0] * weight.shape[0] <= at_once:
        return F.cross_entropy(F.linear(x, weight, padding).float(), targets)
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    with torch.autocast(kind, enabled=False):
        n_rows = 2 ** int(math.log2(max(1, at_once // weight.shape[0])))
        return _Chunked.apply(x, weight, targets, dtype, n_rows, torch.is_grad_enabled(), padding)


def head_losses(x: Tensor, weight: Tensor, targets: Tensor, n_vocab: int | None = None) -> Tensor:
    """What `head_loss` is the mean of, (N,) in float32, 0 for targets of -100; held as few logits at once."""
    padding, n_rows = padding_logits(weight, n_vocab), max(1, AT_ONCE[x.device.type] // weight.shape[0])
    chunks = zip(x.split(n_rows), targets.split(n_rows), strict=True)
    return torch.cat(
        [F.cross_entropy(F.linear(xs, weight, padding).float(), ts, reduction="none") for xs, ts in chunks]
    )


def padding_logits(weight: Tensor, n_vocab: int | None) -> Tensor | None:
    """What a logit gets added, (V,): minus infinity where its id is padding; None where none is."""
    if n_vocab is None or n_vocab == weight.shape[0]:
        return None
    return torch.where(torch.arange(weight.shape[0], device=weight.device) < n_vocab, 0.0, -math.inf).to(weight.dtype)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, dtype, n_rows, with_gradients, padding):
        w = weight.to(dtype)
        counts = (targets != -100).unsqueeze(1)
        share, total = 1 / counts.sum(), x.new_zeros((), dtype=torch.float32)
        if with_gradients:
            dx, dw = torch.empty_like(x), torch.zeros_like(weight)
        held = x.new_empty(n_rows, weight.shape[0], dtype=torch.float32)
        for at in range(0, x.shape[0], n_rows):
            chunk = slice(at, at + n_rows)
            counted, target = counts[chunk], targets[chunk].clamp(min=0).unsqueeze(1)
            xs = x[chunk].to(dtype)
            z = torch.mm(xs, w.T, out=held[: len(xs)]) if dtype == held.dtype else held[: len(xs)].copy_(xs @ w.T)
            if padding is not None:
                z.add_(padding)
            highest, of_target = z.amax(1, keepdim=True), z.gather(1, target)
            z.sub_(highest).exp_()
            z_sum = z.sum(1, keepdim=True)
            total += (counted * (z_sum.log() + (highest - of_target))).sum()
            if with_gradients:  # softmax minus one-hot, over the number of targets
                z.mul_(counted * share / z_sum)
                z.scatter_(1, target, z.gather(1, target) - counted * share)
                dz = z.to(dtype)
                dx[chunk] = dz @ w
                dw.addmm_(dz.T, xs) if dtype == dw.dtype else dw.add_(dz.T @ xs)
        if with_gradients:
            ctx.save_for_backward(dx, dw)
        return total * share

    @staticmethod
    @once_differentiable
    def backward(ctx, d):
        dx, dw = ctx.saved_tensors
        return dx * d, dw * d, None, None, None, None, None
