"""What a model is made of, as plain values. Sizes follow the GPT-2 names."""

from dataclasses import dataclass, field
from enum import StrEnum

from errors import UserError


class NormKind(StrEnum):
    layernorm = "layernorm"
    rmsnorm = "rmsnorm"
    identity = "identity"


class Placement(StrEnum):
    pre = "pre"
    post = "post"


class Kernels(StrEnum):
    auto = "auto"
    triton = "triton"
    cpu = "cpu"
    torch = "torch"
    plain = "plain"


@dataclass
class NormConfig:
    kind: NormKind = NormKind.rmsnorm
    eps: float = 1e-5
    """Added to the mean square (RMSNorm) or the variance (LayerNorm), under the root."""
    zero_centered: bool = False
    """The gain is stored as g - 1, so that weight decay pulls it to 1 and not to 0."""


@dataclass
class ModelConfig:
    norm: NormConfig = field(default_factory=NormConfig)
    placement: Placement = Placement.pre
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    block_size: int = 128
    """Tokens per training sequence; also the longest context of a sample."""
    n_hidden: int | None = None
    """Width of the SwiGLU; none = 8/3 n_embd, rounded up to a multiple of 32."""
    vocab_multiple: int = 64
    """The vocabulary is that of the data, padded up to a multiple of this; the ids added have no part in the loss."""
    dropout: float = 0.0
    bias: bool = False
    """Biases in the linear layers and in LayerNorm; RMSNorm has none."""
    tie_embeddings: bool = True
    activation_checkpointing: bool = False
    """Compute each block again in the backward pass, instead of keeping what it made: a third slower, less memory."""
    rope_theta: float = 10_000.0

    def __post_init__(self):
        for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_multiple"):
            if getattr(self, name) < 1:
                raise UserError(f"model.{name}={getattr(self, name)} must be at least 1")
        if self.n_embd % self.n_head:
            nearest = max(self.n_embd // self.n_head, 1) * self.n_head
            raise UserError(
                f"model.n_embd={self.n_embd} must be a multiple of model.n_head={self.n_head}; the nearest is {nearest}"
            )
        if self.head_width % 2:
            raise UserError(
                f"a head is n_embd/n_head = {self.n_embd}/{self.n_head} = {self.head_width} wide, and RoPE turns "
                f"channels in pairs; model.n_embd={self.n_embd + self.n_head} would give an even width"
            )
        if not 0 <= self.dropout < 1:
            raise UserError(f"model.dropout={self.dropout} must lie in [0, 1)")
        if self.n_hidden is not None and self.n_hidden < 1:
            raise UserError(f"model.n_hidden={self.n_hidden} must be at least 1, or null for 8/3 n_embd")
        if self.rope_theta <= 0:
            raise UserError(f"model.rope_theta={self.rope_theta} must be positive; 10000 is usual")
        if self.norm.eps <= 0:
            raise UserError(f"model.norm.eps={self.norm.eps} must be positive; 1e-5 is usual")

    @property
    def head_width(self) -> int:
        return self.n_embd // self.n_head

    @property
    def hidden_width(self) -> int:
        return self.n_hidden or -(-self.n_embd * 8 // (3 * 32)) * 32
