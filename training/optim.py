"""AdamW with its two parameter groups, and an update that a non-finite gradient cannot reach."""

import math

import torch
from torch import Tensor, nn

from training.config import OptimConfig
from training.distributed import ALONE, World
from training.spikes import Spikes


def parameter_groups(model: nn.Module, cfg: OptimConfig) -> list[dict]:
    """Matrices are decayed; gains and biases only with optim.decay_gains."""
    decayed = [p for p in model.parameters() if p.ndim >= 2 or cfg.decay_gains]
    others = [p for p in model.parameters() if p.ndim < 2 and not cfg.decay_gains]
    return [{"params": decayed, "weight_decay": cfg.weight_decay}, {"params": others, "weight_decay": 0.0}]


class AdamW:
    """AdamW (Loshchilov & Hutter 2019) by PyTorch's fused kernel, one call for all parameters of a group.

    Moments are allocated at once, so that a checkpoint loads into them; `state` has step, exp_avg and exp_avg_sq of a
    parameter, as torch.optim's. `found_inf`, shape (), stays 0 while losses and gradients are finite. Of weights that
    are split over processes each updates its own part.
    """

    def __init__(self, model: nn.Module, cfg: OptimConfig, world: World = ALONE):
        self.cfg, self.world = cfg, world
        device = next(model.parameters()).device
        self.found_inf = torch.zeros((), device=device)
        self.groups = [group for group in parameter_groups(model, cfg) if group["params"]]
        self.params = [p for group in self.groups for p in group["params"]]
        self.state = {
            p: {
                "step": torch.zeros((), device=device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
            for p in self.params
        }
        self.moments = [
            [[own_part(self.state[p][name]) for p in group["params"]] for name in ("exp_avg", "exp_avg_sq", "step")]
            for group in self.groups
        ]

    def gradients(self, params: list[nn.Parameter]) -> list[Tensor]:
        return [own_part(p.grad) for p in params]

    def step(self, lr: float, grad_scale: Tensor, skip: Tensor) -> None:
        """One update by the gradients / grad_scale, or none where `skip` is 1. All stays on the device."""
        for group, (exp_avg, exp_avg_sq, steps) in zip(self.groups, self.moments, strict=True):
            torch._foreach_add_(steps, 1 - skip)
            torch._fused_adamw_(
                [own_part(p) for p in group["params"]], self.gradients(group["params"]), exp_avg, exp_avg_sq, [], steps,
                lr=lr, beta1=self.cfg.beta1, beta2=self.cfg.beta2, weight_decay=group["weight_decay"], eps=self.cfg.eps,
                amsgrad=False, maximize=False, grad_scale=grad_scale, found_inf=skip,
            )  # fmt: skip


def own_part(t: Tensor) -> Tensor:
    """The part of a tensor that this process holds; all of it where it is not split."""
    return t.to_local() if hasattr(t, "to_local") else t


@torch.no_grad()
def guarded_update(optimizer: AdamW, *, loss: Tensor, lr: float, clip: float, spikes: Spikes | None = None) -> Tensor:
    """Clips, updates unless the loss or the gradient is, or ever was, non-finite, and frees the gradients.

    Nothing here waits for the device, but on Metal. Returns the gradient's norm before clipping, shape (), and leaves
    the verdict in `optimizer.found_inf`, which stays 1 once it is: the weights remain those before the first bad step.
    A step that `spikes` finds to stand out makes no update either.
    """
    gradients = optimizer.gradients(optimizer.params)
    norm = optimizer.world.norm(nn.utils.get_total_norm(gradients))
    skip = optimizer.found_inf.logical_or_(~torch.isfinite(loss + norm))
    if spikes:
        stands_out = spikes.stands_out(loss, norm)
        skip = torch.max(skip, stands_out)
        if spikes.stop:
            optimizer.found_inf.copy_(skip)
    scale = (norm / (clip or math.inf)).clamp(min=1)  # the fused kernel divides by it, which saves a pass
    if norm.device.type != "mps":
        optimizer.step(lr, scale, skip)
    elif not skip:  # Metal's fused kernel looks at neither
        torch._foreach_div_(gradients, scale)
        optimizer.step(lr, torch.ones_like(scale), skip)
    for p in optimizer.params:
        p.grad = None
    return norm
