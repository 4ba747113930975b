"""How a model is trained, as plain values."""

from dataclasses import dataclass
from enum import StrEnum

from errors import UserError


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    mps = "mps"


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class Compile(StrEnum):
    auto = "auto"
    eager = "eager"
    block = "block"
    full = "full"


class Strategy(StrEnum):
    auto = "auto"
    none = "none"
    ddp = "ddp"
    fsdp = "fsdp"


class OnSpike(StrEnum):
    ignore = "ignore"
    skip = "skip"
    stop = "stop"


class Schedule(StrEnum):
    cosine = "cosine"
    linear = "linear"
    wsd = "wsd"
    constant = "constant"


class WandbMode(StrEnum):
    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


@dataclass
class TrainConfig:
    steps: int = 800
    """Optimiser steps of the whole schedule."""
    stop_at: int | None = None
    """Stop after this step; the schedule stays that of `steps`."""
    batch_size: int = 16
    """Sequences per optimiser step, over all micro-batches."""
    accumulate: int = 1
    """Micro-batches that a batch is cut into."""
    on_spike: OnSpike = OnSpike.ignore
    """What to do about a step whose loss or gradient norm lies `spike_sigma` standard deviations above the mean of the
    128 steps before it: nothing, leave its update out, or stop there as after a loss that is not finite."""
    spike_sigma: float = 6.0
    grad_clip: float = 1.0
    """Largest norm of the whole gradient; 0 = no clipping."""
    eval_every: int = 100
    eval_tokens: int | None = 65_536
    """Validation tokens, the same ones every time, spread evenly over the split; null = the whole split."""
    log_every: int = 10
    """Steps between lines on the terminal, and between reads of the device."""
    sample_chars: int = 200
    """Characters of text sampled from the final model; 0 = none."""

    def __post_init__(self):
        for name in ("steps", "batch_size", "accumulate", "eval_every", "log_every"):
            if getattr(self, name) < 1:
                raise UserError(f"train.{name}={getattr(self, name)} must be at least 1")
        if self.batch_size % self.accumulate:
            divisors = [d for d in range(1, self.batch_size + 1) if self.batch_size % d == 0]
            raise UserError(
                f"train.batch_size={self.batch_size} cannot be cut into train.accumulate={self.accumulate} equal "
                f"micro-batches; these divide it: {', '.join(map(str, divisors))}"
            )
        if self.eval_tokens is not None and self.eval_tokens < 1:
            raise UserError(f"train.eval_tokens={self.eval_tokens} must be at least 1, or null for the whole split")
        if self.stop_at is not None and not 1 <= self.stop_at <= self.steps:
            raise UserError(f"train.stop_at={self.stop_at} must lie in 1 ... train.steps={self.steps}")
        if self.sample_chars < 0:
            raise UserError(f"train.sample_chars={self.sample_chars} must not be negative; 0 samples nothing")
        if self.spike_sigma <= 0:
            raise UserError(f"train.spike_sigma={self.spike_sigma} must be more than 0; 6 is usual")
        if self.grad_clip < 0:
            raise UserError(f"train.grad_clip={self.grad_clip} must not be negative; 0 turns clipping off")

    @property
    def last_step(self) -> int:
        return self.stop_at or self.steps


@dataclass
class OptimConfig:
    lr: float = 1e-3
    """Learning rate at the end of the warm-up."""
    min_lr: float = 1e-4
    """Learning rate at the end of the schedule."""
    warmup: int = 100
    """Steps of linear warm-up."""
    schedule: Schedule = Schedule.cosine
    weight_decay: float = 0.1
    decay_gains: bool = False
    """Let weight decay act on norm gains and biases too."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8

    def __post_init__(self):
        for name in ("lr", "min_lr", "warmup", "weight_decay", "eps"):
            if getattr(self, name) < 0:
                raise UserError(f"optim.{name}={getattr(self, name)} must not be negative")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"optim.{name}={getattr(self, name)} must lie in [0, 1)")


@dataclass
class DistConfig:
    """How the processes that torchrun starts train one model."""

    strategy: Strategy = Strategy.auto
    """ddp: each holds the model. fsdp (FSDP2): each holds a part of the weights, gradients and moments. auto = ddp."""
    shard: int | None = None
    """fsdp: processes that hold one model between them; null = all. Those of one machine, for example (HSDP)."""
    reshard: bool = True
    """fsdp: give up a block's gathered weights after its forward pass; false keeps them, which saves a gathering."""
    gather: Dtype = Dtype.float32
    """fsdp: what weights travel in. bfloat16 halves the traffic and rounds gains and the stream too; float32 as ddp."""
    timeout_s: int = 600
    """Seconds without a step after which the process that holds up the others is named, and all end."""

    def __post_init__(self):
        if self.shard is not None and self.shard < 1:
            raise UserError(f"dist.shard={self.shard} must be at least 1, or null for all processes")
        if self.timeout_s < 1:
            raise UserError(f"dist.timeout_s={self.timeout_s} must be at least 1")
        if self.gather == Dtype.auto:
            raise UserError("dist.gather=auto: choose float32 or bfloat16")


@dataclass
class CheckpointConfig:
    every: int = 500
    """Steps between checkpoints; one is also written at the end and on Ctrl-C. 0 = only those."""
    keep: int = 2
    """Newest checkpoints kept; the best one's weights are kept besides."""

    def __post_init__(self):
        if self.every < 0:
            raise UserError(f"checkpoint.every={self.every} must not be negative; 0 saves at the end alone")
        if self.keep < 1:
            raise UserError(f"checkpoint.keep={self.keep} must be at least 1")


@dataclass
class WandbConfig:
    mode: WandbMode = WandbMode.auto
    """auto = online where a key is set up, else offline. WANDB_MODE overrides it."""
    project: str = "normgpt"
    group: str | None = None


@dataclass
class CompareConfig:
    tolerance: float = 0.02
    """Losses closer than this, in nats per token, count as overlapping where no seed noise was measured."""
    margin: float = 0.01
    """Final validation losses closer than this, in nats per token, count as equivalent."""
    report: bool = True
    """At the end, compare with finished siblings too, and write compare.png and report.html."""

    def __post_init__(self):
        if self.tolerance < 0:
            raise UserError(f"compare.tolerance={self.tolerance} must not be negative")
        if self.margin <= 0:
            raise UserError(f"compare.margin={self.margin} must be more than 0")
