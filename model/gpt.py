"""A decoder-only Transformer with LLaMA-style blocks, whose norms and their placement can be swapped.

Shapes: B batch, T time, H heads, D head width, C = H·D = n_embd, V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.config import Kernels, ModelConfig, Placement
from model.init import init_weights
from model.loss import head_loss, head_losses
from model.norm import Norm, backend, build_norm
from model.rope import rope_table

# What travels from site to site: the stream, and the last branch where it is not added yet. A norm adds and normalises
# in one pass, so pre placement leaves each add to the norm that follows.


def pre(stream: Tensor, branch: Tensor | None, norm: Norm, layer: Callable[[Tensor], Tensor]):
    """stream + layer(norm(stream)), the add left open."""
    y, stream = norm(stream, branch)
    return stream, layer(y)


def post(stream: Tensor, branch: None, norm: Norm, layer: Callable[[Tensor], Tensor]):
    """norm(stream + layer(stream))."""
    y, _ = norm(stream, layer(stream))
    return y, None


PLACEMENTS = {Placement.pre: pre, Placement.post: post}


class Attention(nn.Module):
    """Causal self-attention with rotary positions, (B, T, C) -> (B, T, C); within a mask (B, 1, T, T), if any."""

    def __init__(self, cfg: ModelConfig, kernels: Kernels):
        super().__init__()
        self.n_head, self.dropout, self.rope = cfg.n_head, cfg.dropout, backend(kernels).rope
        self.qkv = nn.Linear(cfg.n_embd, 3 * cfg.n_embd, bias=cfg.bias)
        self.out = nn.Linear(cfg.n_embd, cfg.n_embd, bias=cfg.bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))  # (B, H, T, D)
        q, k = self.rope(q, k, cos, sin)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, dropout_p=dropout)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class SwiGLU(nn.Module):
    """down(silu(gate x) · up x) (Shazeer 2020), (B, T, C) -> (B, T, C)."""

    def __init__(self, cfg: ModelConfig, kernels: Kernels):
        super().__init__()
        self.swiglu = backend(kernels).swiglu
        self.gate_up = nn.Linear(cfg.n_embd, 2 * cfg.hidden_width, bias=cfg.bias)
        self.down = nn.Linear(cfg.hidden_width, cfg.n_embd, bias=cfg.bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.swiglu(gate, up))


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig, kernels: Kernels):
        super().__init__()
        self.place = PLACEMENTS[cfg.placement]
        self.attention_norm = build_norm(cfg.n_embd, cfg.norm, bias=cfg.bias, kernels=kernels)
        self.attention = Attention(cfg, kernels)
        self.mlp_norm = build_norm(cfg.n_embd, cfg.norm, bias=cfg.bias, kernels=kernels)
        self.mlp = SwiGLU(cfg, kernels)
        self.drop = nn.Dropout(cfg.dropout)

    def forward(
        self, stream: Tensor, branch: Tensor | None, cos: Tensor, sin: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        attend = lambda x: self.drop(self.attention(x, cos, sin, mask))  # noqa: E731
        stream, branch = self.place(stream, branch, self.attention_norm, attend)
        return self.place(stream, branch, self.mlp_norm, lambda x: self.drop(self.mlp(x)))


def within_documents(tokens: Tensor, separator: int) -> Tensor:
    """Which positions may see which, (B, T) -> (B, 1, T, T): earlier ones of the same document, and itself."""
    document = (tokens == separator).cumsum(1)  # (B, T)
    same = document[:, None, :, None] == document[:, None, None, :]
    return same & torch.ones_like(same[0, 0]).tril()


class GPT(nn.Module):
    """Tokens in, logits out; with targets, the mean cross-entropy in nats per token.

    forward(tokens (B, T)) -> (B, T, vocab_size); forward(tokens, targets (B, T)) -> (), or with `each`
    -> (B, T), the loss of each. Targets of -100 do not count.
    Weights are drawn from `seed`, each keyed by its own name (see model.init). T must not exceed cfg.block_size. Ids
    from vocab_size on are padding, and have no part in the loss. Where the id `separator` is given, it begins a
    document, and attention stays within documents.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        vocab_size: int,
        *,
        kernels: Kernels = Kernels.torch,
        seed: int = 0,
        separator: int | None = None,
    ):
        super().__init__()
        self.cfg, self.n_vocab, self.separator = cfg, vocab_size, separator
        self.vocab_size = -(-vocab_size // cfg.vocab_multiple) * cfg.vocab_multiple
        self.embedding = nn.Embedding(self.vocab_size, cfg.n_embd)
        self.drop = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(Block(cfg, kernels) for _ in range(cfg.n_layer))
        # in post placement the last block's own norm already stands before the head
        last = cfg.placement == Placement.pre
        self.final_norm = build_norm(cfg.n_embd, cfg.norm, bias=cfg.bias, kernels=kernels) if last else None
        self.head = nn.Linear(cfg.n_embd, self.vocab_size, bias=False)
        if cfg.tie_embeddings:
            self.head.weight = self.embedding.weight
        cos, sin = rope_table(cfg.block_size, cfg.head_width, cfg.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        init_weights(self, seed=seed, n_layer=cfg.n_layer)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, each: bool = False) -> Tensor:
        T = tokens.shape[1]
        cos, sin = self.cos[:T], self.sin[:T]
        mask = None if self.separator is None else within_documents(tokens, self.separator)
        stream, branch = self.drop(self.embedding(tokens)), None
        for block in self.blocks:
            if self.cfg.activation_checkpointing and self.training:
                stream, branch = checkpoint(block, stream, branch, cos, sin, mask, use_reentrant=False)
            else:
                stream, branch = block(stream, branch, cos, sin, mask)
        y = stream if self.final_norm is None else self.final_norm(stream, branch)[0]
        if targets is None:
            return self.head(y)[..., : self.n_vocab]
        to_be_predicted = y.flatten(0, 1), self.head.weight, targets.flatten(), self.n_vocab
        return head_losses(*to_be_predicted).view_as(targets) if each else head_loss(*to_be_predicted)

    def num_params(self) -> int:
        """Trainable numbers; tied embeddings count once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self) -> int:
        """Training FLOPs per token, forward and backward: 6 per matrix weight, and 12·n_layer·n_embd·T for attention.

        PaLM (Chowdhery et al. 2022, appendix B), with no discount for the causal mask and none of the gains counted.
        """
        matrices = sum(p.numel() for name, p in self.named_parameters() if p.ndim == 2 and name != "embedding.weight")
        head = (
            0 if not self.cfg.tie_embeddings else self.embedding.weight.numel()
        )  # untied, `head.weight` is in the sum
        return 6 * (matrices + head) + 12 * self.cfg.n_layer * self.cfg.n_embd * self.cfg.block_size

    @torch.no_grad()
    def generate(self, tokens: Tensor, n_tokens: int, *, generator: torch.Generator) -> Tensor:
        """Appends n_tokens sampled ones, (B, T) -> (B, T + n_tokens); padding is never drawn."""
        for _ in range(n_tokens):
            logits = self(tokens[:, -self.cfg.block_size :])[:, -1]
            p = logits.float().softmax(dim=-1).cpu()
            tokens = torch.cat([tokens, torch.multinomial(p, 1, generator=generator).to(tokens.device)], dim=1)
        return tokens
