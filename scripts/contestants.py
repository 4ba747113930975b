"""Training steps to be timed beside each other: ours, those of other libraries for one shape, and the products alone.

Shapes: B batch, T time, C = n_embd, V vocabulary.
"""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from errors import UserError, near
from model.config import Kernels, ModelConfig, NormConfig, NormKind
from model.gpt import GPT
from model.norm import build_norm
from training.config import Compile, OptimConfig
from training.device import compiled
from training.optim import AdamW, guarded_update, parameter_groups
from training.timing import now

MODELS = Path(__file__).parents[1] / "configs" / "model"
WARMUP = 5  # steps of each; its first compiles
LossOf = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Contestant:
    """`about` is what tells it from the others: implementation, norm, kernels, compile."""

    about: dict[str, str]
    step: Callable[[], object]
    ms: list[float] = field(default_factory=list)


def shape_of(name: str, block: int, **others) -> ModelConfig:
    """The model of configs/model/NAME.yaml at this block size, without dropout and padding."""
    names = [path.stem for path in MODELS.glob("*.yaml")]
    if name not in names:
        raise UserError(f"there is no model {name!r}; {near(name, names)}")
    values = yaml.safe_load((MODELS / f"{name}.yaml").read_text())
    return ModelConfig(**values | {"block_size": block, "dropout": 0.0, "vocab_multiple": 1} | others)


def draw_batch(vocab: int, batch: int, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and their targets, (B, T) each."""
    tokens = torch.randint(vocab, (batch, block + 1), generator=torch.Generator().manual_seed(0)).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


# whole steps


def trained(loss_of: LossOf, update: Callable[[Tensor], object], x: Tensor, y: Tensor) -> Callable[[], None]:
    """One training step by the loss loss_of(x, y) of tokens x and targets y, (B, T) each, and update(loss)."""

    def step() -> None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            loss = loss_of(x, y)
        loss.backward()
        update(loss.detach())

    return step


def ours(cfg: ModelConfig, norm: str, kernels: str, mode: str, x: Tensor, y: Tensor, vocab: int) -> Contestant:
    """A step as train.py takes it, without its records."""
    shape = ModelConfig(**vars(cfg) | {"norm": NormConfig(kind=NormKind(norm))})
    torch._dynamo.config.recompile_limit = 64  # one for each contestant: all have the same code
    model = GPT(shape, vocab, kernels=Kernels(kernels)).to(x.device)
    optimizer = AdamW(model, OptimConfig())
    loss_of = compiled(model, x.device, Compile(mode))
    about = {"implementation": "normgpt", "norm": str(norm), "kernels": str(kernels), "compile": mode}
    step = trained(loss_of, lambda loss: guarded_update(optimizer, loss=loss, lr=1e-4, clip=1.0), x, y)
    return Contestant(about, step)


def theirs(peer: str, cfg: ModelConfig, mode: str, x: Tensor, y: Tensor, vocab: int) -> Contestant:
    """The same step of another library's model of our shape, by PyTorch's own clipping, AdamW and torch.compile."""
    model, logits = PEERS[peer](cfg, vocab)
    model.to(x.device)
    groups = parameter_groups(model, OptimConfig())
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits(x).float().flatten(0, 1), y.flatten())

    def update(_: Tensor) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    if mode == "full":
        loss_of = torch.compile(loss_of, fullgraph=True, dynamic=False)
    about = {"implementation": f"{peer} {version(peer)}", "norm": "rmsnorm", "kernels": "", "compile": mode}
    return Contestant(about, trained(loss_of, update, x, y))


def llama(cfg: ModelConfig, vocab: int) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """transformers' Llama, and its logits of tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab, hidden_size=cfg.n_embd, intermediate_size=cfg.hidden_width,
            num_hidden_layers=cfg.n_layer, num_attention_heads=cfg.n_head, max_position_embeddings=cfg.block_size,
            rms_norm_eps=cfg.norm.eps, tie_word_embeddings=cfg.tie_embeddings, use_cache=False,
            attn_implementation="sdpa",
        )
    )  # fmt: skip
    return model, lambda x: model(input_ids=x).logits


def litgpt(cfg: ModelConfig, vocab: int) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """litgpt's GPT with its Llama options, and its logits of tokens."""
    from litgpt.config import Config
    from litgpt.model import GPT as LitGPT

    model = LitGPT(
        Config(
            n_layer=cfg.n_layer, n_head=cfg.n_head, n_embd=cfg.n_embd, intermediate_size=cfg.hidden_width,
            block_size=cfg.block_size, vocab_size=vocab, padded_vocab_size=vocab, rotary_percentage=1.0,
            parallel_residual=False, bias=False, lm_head_bias=False, norm_class_name="RMSNorm", norm_eps=cfg.norm.eps,
            mlp_class_name="LLaMAMLP",
        )
    )  # fmt: skip
    if cfg.tie_embeddings:
        model.lm_head.weight = model.transformer.wte.weight
    return model, model


PEERS = {"transformers": llama, "litgpt": litgpt}


# parts of a step


def norm_alone(cfg: ModelConfig, norm: str, kernels: str, batch: int, device: torch.device) -> Contestant:
    """Forward and backward of one norm with the residual add before it, (B, T, C)."""
    module = build_norm(cfg.n_embd, NormConfig(kind=NormKind(norm)), bias=cfg.bias, kernels=Kernels(kernels)).to(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    stream, branch, dy, dh = (
        torch.randn(batch, cfg.block_size, cfg.n_embd, device=device, dtype=dtype) for _ in range(4)
    )
    stream.requires_grad_()
    branch.requires_grad_()
    wanted = [stream, branch, *module.parameters()]

    def step() -> None:
        torch.autograd.grad(module(stream, branch), wanted, (dy, dh))

    about = {"implementation": "one norm alone", "norm": str(norm), "kernels": str(kernels), "compile": "eager"}
    return Contestant(about, step)


def matrix_products(cfg: ModelConfig, vocab: int, batch: int, device: torch.device) -> Contestant:
    """The step's products, each with operands and result of its own: three for each weight, six for each attention.

    Those of attention are without a discount for the causal mask.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    M, C, D = batch * cfg.block_size, cfg.n_embd, cfg.head_width
    widths = [(C, 3 * C), (C, C), (C, 2 * cfg.hidden_width), (cfg.hidden_width, C)] * cfg.n_layer + [(C, vocab)]
    todo = []

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def add(a: Tensor, b: Tensor) -> None:
        todo.append((a, b, a @ b))

    for inside, outside in widths:
        x, w, dy = draw(M, inside), draw(outside, inside), draw(M, outside)
        for a, b in ((x, w.T), (dy, w), (dy.T, x)):
            add(a, b)
    for _ in range(cfg.n_layer):
        heads = batch * cfg.n_head
        q, k, v, dy = (draw(heads, cfg.block_size, D) for _ in range(4))
        p = draw(heads, cfg.block_size, cfg.block_size)
        for a, b in ((q, k.mT), (p, v), (dy, v.mT), (p.mT, dy), (p, k), (p.mT, q)):
            add(a, b)

    def step() -> None:
        for a, b, out in todo:
            torch.matmul(a, b, out=out)

    return Contestant({"implementation": "matrix products", "norm": "", "kernels": "", "compile": ""}, step)


# how


def interleave(everyone: list[Contestant], steps: int, device: torch.device) -> None:
    """One step of each, in an order drawn anew each time, so that neither neighbours nor drift favour any."""
    order = random.Random(0)
    for n in range(WARMUP + steps):
        for one in order.sample(everyone, len(everyone)):
            start = now(device)
            one.step()
            if n >= WARMUP:
                one.ms.append(1e3 * (now(device) - start))


def peak_mib(step: Callable[[], object], device: torch.device) -> float:
    """Largest memory that tensors of one call held beyond what stood before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would say when it starts and stops
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    held = peak = 0
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak / 2**20
