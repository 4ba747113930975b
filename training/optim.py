"""AdamW with its two parameter groups, and an update that a non-finite gradient cannot reach."""

import math

import torch
from torch import Tensor, nn

from training.config import OptimConfig


def parameter_groups(model: nn.Module, cfg: OptimConfig) -> list[dict]:
    """Matrices are decayed; gains and biases only with optim.decay_gains."""
    decayed = [p for p in model.parameters() if p.ndim >= 2 or cfg.decay_gains]
    others = [p for p in model.parameters() if p.ndim < 2 and not cfg.decay_gains]
    return [{"params": decayed, "weight_decay": cfg.weight_decay}, {"params": others, "weight_decay": 0.0}]


def build_optimizer(model: nn.Module, cfg: OptimConfig) -> torch.optim.AdamW:
    """Fused AdamW (Loshchilov & Hutter 2019) with moments allocated at once, so that a checkpoint loads into them."""
    groups = [g for g in parameter_groups(model, cfg) if g["params"]]
    optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=True)
    device = next(model.parameters()).device
    # fused AdamW leaves weights, moments and step counts alone where this is 1: the hook that GradScaler uses
    optimizer.grad_scale, optimizer.found_inf = None, torch.zeros((), device=device)
    for p in model.parameters():
        optimizer.state[p] = {
            "step": torch.zeros((), device=device),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return optimizer


@torch.no_grad()
def guarded_update(optimizer: torch.optim.AdamW, model: nn.Module, *, loss: Tensor, lr: float, clip: float) -> Tensor:
    """Clips, updates unless the loss or the gradient is, or ever was, non-finite, and frees the gradients.

    Nothing here waits for the device. Returns the gradient's norm before clipping, shape (), and leaves the verdict in
    `optimizer.found_inf`, which stays 1 once it is: the weights remain those before the first bad step.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    optimizer.found_inf.logical_or_(~torch.isfinite(loss + norm))
    if norm.device.type != "mps" or not optimizer.found_inf:  # Metal's fused AdamW does not look at found_inf
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
