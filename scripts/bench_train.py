"""Times whole training steps: ours by norm, kernels and compilation, transformers' Llama of one shape, and their floor.

python -m scripts.bench_train [to=train.json] [model=tiny] [block=64] [batch=12] [vocab=256] [steps=100]
    [norm=layernorm,rmsnorm,identity] [kernels=plain,torch,cpu] [compile=eager,full] [peers=transformers]

Only what is named runs, or all that can. The steps of all are interleaved in one process, on one batch. A step is
forward, backward, clipping and fused AdamW; the floor is its matrix products alone, those of attention without a
discount for the causal mask. `identity` is no norm at all: what lies above it is what a norm costs.
"""

from training.process import keep_freed_memory  # before torch  # isort: skip

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from compare.stats import step_time_ratio
from errors import UserError, near
from kernels.cpu import CannotBuild, library
from model.config import Kernels, ModelConfig, NormConfig, NormKind
from model.gpt import GPT
from scripts.options import run_script
from scripts.results import table, write
from training.config import OptimConfig
from training.device import compiled
from training.optim import AdamW, guarded_update, parameter_groups
from training.timing import now, peak_flops

MODELS = Path(__file__).parents[1] / "configs" / "model"
WARMUP = 5  # steps of each; its first compiles


@dataclass
class Options:
    model: str | None = None
    block: int | None = None
    batch: int | None = None
    vocab: int | None = None
    steps: int = 100
    norm: str | None = None
    kernels: str | None = None
    compile: str | None = None
    peers: str | None = None
    to: str | None = None


# nanoGPT's CPU setting, and GPT-2 small
DEFAULTS = {
    "cpu": {"model": "tiny", "block": 64, "batch": 12, "vocab": 256},
    "cuda": {"model": "gpt2_124m", "block": 1024, "batch": 16, "vocab": 50304},
}


@dataclass
class Contestant:
    """`about` is what tells it from the others: implementation, norm, kernels, compile."""

    about: dict[str, str]
    step: Callable[[], object]
    ms: list[float] = field(default_factory=list)


# what is timed


def trained(loss_of: Callable, update: Callable[[Tensor], object], x: Tensor, y: Tensor) -> Callable[[], None]:
    """One training step by the loss loss_of(x, y) of tokens x and targets y, (B, T) each, and update(loss)."""

    def step() -> None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            loss = loss_of(x, y)
        loss.backward()
        update(loss.detach())

    return step


def ours(model: nn.Module) -> Callable[[Tensor], object]:
    optimizer = AdamW(model, OptimConfig())
    return lambda loss: guarded_update(optimizer, loss=loss, lr=1e-4, clip=1.0)


def usual(model: nn.Module) -> Callable[[Tensor], object]:
    """What a training loop of transformers does: PyTorch's clipping and its fused AdamW."""
    optimizer = torch.optim.AdamW(parameter_groups(model, OptimConfig()), lr=1e-4, betas=(0.9, 0.95), fused=True)

    def update(_: Tensor) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return update


def llama(cfg: ModelConfig, vocab: int, device: torch.device) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """transformers' Llama of our shape, and our loss of its logits: SwiGLU, RoPE, RMSNorm, no biases."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab, hidden_size=cfg.n_embd, intermediate_size=cfg.hidden_width,
            num_hidden_layers=cfg.n_layer, num_attention_heads=cfg.n_head, max_position_embeddings=cfg.block_size,
            rms_norm_eps=cfg.norm.eps, tie_word_embeddings=cfg.tie_embeddings, use_cache=False,
            attn_implementation="sdpa",
        )
    ).to(device)  # fmt: skip
    return model, lambda x, y: F.cross_entropy(model(input_ids=x).logits.float().flatten(0, 1), y.flatten())


def matrix_products(cfg: ModelConfig, vocab: int, batch: int, device: torch.device) -> Callable[[], None]:
    """The step's products, each with operands and result of its own: three for each weight, six for each attention."""
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

    return step


def chosen(key: str, given: str | None, known: list[str]) -> list[str]:
    """The names in a list with commas, all where there is none; UserError for one that is not known."""
    names = known if given is None else [name for name in given.split(",") if name]
    for name in names:
        if name not in known:
            raise UserError(f"{key}={name} is not to be had here; {near(name, known)}")
    return names


def backends(device: torch.device) -> list[str]:
    """The kernels that run here."""
    if device.type == "cuda":
        return [Kernels.plain, Kernels.torch, *([Kernels.triton] if find_spec("triton") else [])]
    try:
        library()
    except CannotBuild as e:
        print(f"without kernels=cpu: {e}")
        return [Kernels.plain, Kernels.torch]
    return [Kernels.plain, Kernels.torch, Kernels.cpu]


def contestants(cfg: ModelConfig, options: Options, device: torch.device) -> list[Contestant]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(options.vocab, (options.batch, options.block + 1), generator=generator).to(device)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    found = []
    norms, modes = chosen("norm", options.norm, list(NormKind)), chosen("compile", options.compile, ["eager", "full"])
    for norm, kernels, mode in product(norms, chosen("kernels", options.kernels, backends(device)), modes):
        if (kernels, mode) == (Kernels.cpu, "full"):
            continue  # torch.compile makes kernels of its own
        shape = ModelConfig(**vars(cfg) | {"norm": NormConfig(kind=NormKind(norm))})
        model = GPT(shape, options.vocab, kernels=Kernels(kernels)).to(device)
        about = {"implementation": "normgpt", "norm": str(norm), "kernels": str(kernels), "compile": mode}
        loss_of = compiled(model, device) if mode == "full" else model
        found.append(Contestant(about, trained(loss_of, ours(model), *batch)))
    for peer in chosen("peers", options.peers, ["transformers"]):
        if not find_spec(peer):
            print(f"without {peer}, which is not installed")
            continue
        for mode in modes:
            model, loss_of = llama(cfg, options.vocab, device)
            about = {"implementation": peer, "norm": "rmsnorm", "kernels": "", "compile": mode}
            loss_of = torch.compile(loss_of, fullgraph=True, dynamic=False) if mode == "full" else loss_of
            found.append(Contestant(about, trained(loss_of, usual(model), *batch)))
    floor = {"implementation": "matrix products", "norm": "", "kernels": "", "compile": ""}
    return [*found, Contestant(floor, matrix_products(cfg, options.vocab, options.batch, device))]


# how


def interleave(everyone: list[Contestant], steps: int, device: torch.device) -> None:
    """Each one's steps in turn, forth and back, so that neither order nor drift favours any."""
    for n in range(WARMUP + steps):
        for one in everyone if n % 2 == 0 else reversed(everyone):
            start = now(device)
            one.step()
            if n >= WARMUP:
                one.ms.append(1e3 * (now(device) - start))


def row(one: Contestant, floor: Contestant, options: Options, flops: float | None) -> dict:
    p10, median, p90 = np.percentile(one.ms, [10, 50, 90])
    tokens = options.batch * options.block
    over = step_time_ratio(np.array(floor.ms), np.array(one.ms))
    values = one.about | {"ms": median, "ms_p10": p10, "ms_p90": p90, "over_floor": over.median}
    values["tokens_per_s"] = round(1e3 * tokens / median)
    values["mfu"] = flops and 1e3 * flops / median
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in values.items()}


def render(rows: list[dict]) -> str:
    head = ["", "norm", "kernels", "compile", "step ms", "p10 to p90", "over the floor", "tokens/s"]
    body = []
    for r in rows:
        spread = f"{r['ms_p10']:.2f} to {r['ms_p90']:.2f}"
        cells = [f"{r['ms']:.2f}", spread, f"{r['over_floor']:.2f}", f"{r['tokens_per_s']:,}"]
        body.append([r["implementation"], r["norm"], r["kernels"], r["compile"], *cells])
    return table([head, *body])


def shape_of(options: Options) -> ModelConfig:
    names = [path.stem for path in MODELS.glob("*.yaml")]
    if options.model not in names:
        raise UserError(f"there is no model {options.model!r}; {near(options.model, names)}")
    values = yaml.safe_load((MODELS / f"{options.model}.yaml").read_text())
    return ModelConfig(**values | {"block_size": options.block, "dropout": 0.0})


def main(options: Options) -> None:
    if options.steps < 100:
        raise UserError(f"steps={options.steps} must be at least 100, for the ratios to have an interval")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given = {key: value for key, value in vars(options).items() if value is not None}
    options = Options(**DEFAULTS[device.type] | given)
    cfg = shape_of(options)
    keep_freed_memory()
    everyone = contestants(cfg, options, device)
    interleave(everyone, options.steps, device)
    peak = peak_flops(device, "bfloat16")
    flops = peak and GPT(cfg, options.vocab).flops_per_token() * options.batch * options.block / peak
    rows = [row(one, everyone[-1], options, flops) for one in everyone]
    print(render(rows))
    if options.to:
        write(options.to, rows)


if __name__ == "__main__":
    run_script(main, Options, __doc__)
