"""What a run takes, on paper: memory of a GPU by part, traffic, FLOPs and days; nothing is trained.

python -m scripts.plan [model=llama_7b] [block=4096] [vocab=32000] [tokens=1e12] [batch=1024] [accumulate=4]
    [gpus=64] [shard=64] [gather=float32] [gpu="NVIDIA H100 80GB HBM3"] [mfu=0.4] [to=results/plan/llama_7b.json]

`shard` GPUs hold one model between them (dist.shard), weights travel as `gather`, blocks are computed again in the
backward pass, and matrix products are in bfloat16. T block, C width, L layers, V vocabulary, b bytes of `gather`.
"""

from dataclasses import dataclass

import torch

from errors import UserError, near
from model.gpt import GPT
from model.loss import AT_ONCE
from scripts.contestants import shape_of
from scripts.options import run_script
from scripts.results import table, write
from training.config import Dtype
from training.timing import PEAK_BF16_FLOPS

GIB = 2**30
BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2}


@dataclass
class Options:
    model: str = "llama_7b"
    block: int = 4096
    vocab: int = 32_000
    tokens: float = 1e12
    batch: int = 1024
    accumulate: int = 4
    gpus: int = 64
    shard: int = 64
    gather: Dtype = Dtype.float32
    gpu: str = "NVIDIA H100 80GB HBM3"
    mfu: float = 0.4
    to: str | None = None


def plan(options: Options) -> list[dict]:
    """Rows of what, formula, value and unit."""
    check(options)
    with torch.device("meta"):
        model = GPT(cfg := shape_of(options.model, options.block), options.vocab)
    n, flops = model.num_params(), model.flops_per_token()
    block = sum(p.numel() for p in model.blocks[0].parameters())
    rest, mine, b = n - cfg.n_layer * block, n / options.shard, BYTES[options.gather]
    sequences = options.batch // (options.gpus * options.accumulate)
    positions, step_tokens = sequences * options.block, options.batch * options.block
    logits = min(positions * options.vocab, AT_ONCE["cuda"])
    memory = [
        ("weights", "4 N / shard", 4 * mine),
        ("gradients", "4 N / shard", 4 * mine),
        ("AdamW's moments", "8 N / shard", 8 * mine),
        ("gathered: two blocks, embedding, head", "b (2 n + r)", b * (2 * block + rest)),
        ("gradients of all micro-batches but the last", "4 N, where accumulate > 1", 4 * n * (options.accumulate > 1)),
        ("gradients of a block, embedding and head", "4 (n + r)", 4 * (block + rest)),
        ("what each block begins with: stream, branch", "(4 + 2) L s T C", 6 * cfg.n_layer * positions * cfg.n_embd),
        ("logits held at once, in eager steps", "4 min(s T V, 2^28)", 4 * logits),
    ]  # fmt: skip
    traffic = (options.shard - 1) * mine * (2 * b * options.accumulate + 4)
    rate = options.gpus * PEAK_BF16_FLOPS[options.gpu] * options.mfu
    rows = [
        ("parameters, N", "", n, ""),
        ("of them in a block, n", "", block, ""),
        ("of them in embedding, head and last norm, r", "N - L n", rest, ""),
        ("tokens a step", "batch T", step_tokens, ""),
        ("steps", "tokens / (batch T)", round(options.tokens / step_tokens), ""),
        ("sequences of a micro-batch on a GPU, s", "batch / (GPUs accumulate)", sequences, ""),
        *((what, formula, value / GIB, "GiB") for what, formula, value in memory),
        ("all that, on each GPU", "and one block's activations", sum(value for *_, value in memory) / GIB, "GiB"),
        ("sent by a GPU in a step", "N (shard - 1) / shard (2 b accumulate + 4)", traffic / GIB, "GiB"),
        ("FLOPs a token", "6 (N - embedding) + 12 L C T", flops, ""),
        ("FLOPs in all", "FLOPs a token x tokens", float(flops * options.tokens), ""),
        ("a step", "FLOPs a token x batch T / (GPUs peak MFU)", flops * step_tokens / rate, "s"),
        ("the run", "FLOPs in all / (GPUs peak MFU)", flops * options.tokens / rate / 86_400, "days"),
    ]
    return [dict(zip(("what", "formula", "value", "unit"), row, strict=True)) for row in rows]


def check(options: Options) -> None:
    for key in ("block", "vocab", "tokens", "batch", "accumulate", "gpus", "shard"):
        if getattr(options, key) < 1:
            raise UserError(f"{key}={getattr(options, key)} must be at least 1")
    if options.gpu not in PEAK_BF16_FLOPS:
        raise UserError(f"there is no peak of gpu={options.gpu}; {near(options.gpu, list(PEAK_BF16_FLOPS))}")
    if options.gather not in BYTES:
        raise UserError(f"gather={options.gather} must be float32 or bfloat16")
    if options.gpus % options.shard:
        raise UserError(f"shard={options.shard} must divide gpus={options.gpus}")
    if options.batch % (options.gpus * options.accumulate):
        raise UserError(
            f"batch={options.batch} must be a multiple of gpus x accumulate = {options.gpus * options.accumulate}"
        )
    if not 0 < options.mfu <= 1:
        raise UserError(f"mfu={options.mfu} must lie in (0, 1]; 0.4 is usual for such a model")


def shown(value: float, unit: str) -> str:
    if unit:
        return f"{value:.2f} {unit}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def render(rows: list[dict]) -> str:
    return table([["", "formula", ""], *([r["what"], r["formula"], shown(r["value"], r["unit"])] for r in rows)])


def main(options: Options) -> None:
    rows = plan(options)
    print(render(rows))
    if options.to:
        write(options.to, rows)


if __name__ == "__main__":
    run_script(main, Options, __doc__)
