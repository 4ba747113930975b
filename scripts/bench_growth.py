"""How step time and memory grow with sequences, depth, width, vocabulary and context, each doubled from a small model.

python -m scripts.bench_growth [to=growth.json] [steps=20] [compile=eager|full]

Linear in its axis is what grows x2.00 from line to line; FLOPs are those of the model's formula. Steps of one axis are
interleaved; kernels and loss are those that train.py takes for eager steps, or for compiled ones.
"""

from training.process import keep_freed_memory  # before torch  # isort: skip

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from errors import UserError
from model.config import Kernels
from model.gpt import GPT
from scripts.bench_train import backends
from scripts.contestants import Contestant, draw_batch, interleave, ours, peak_mib, shape_of
from scripts.options import run_script
from scripts.results import table, write
from training.device import make_deterministic

BASE = {"n_layer": 4, "n_embd": 128, "n_head": 4, "block": 128, "batch": 8, "vocab": 256}
AXES = {
    "sequences": [{"batch": n} for n in (1, 2, 4, 8, 16, 32, 64)],
    "depth": [{"n_layer": n} for n in (1, 2, 4, 8, 16, 32)],
    "width": [{"n_embd": n, "n_head": n // 32} for n in (32, 64, 128, 256, 512, 1024)],
    "vocabulary": [{"vocab": n} for n in (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)],
    "context": [{"block": n} for n in (32, 64, 128, 256, 512, 1024, 2048)],
}


@dataclass
class Options:
    steps: int = 20
    compile: str = "eager"
    to: str | None = None


def contestant(case: dict, mode: str, device: torch.device) -> tuple[Contestant, int]:
    """The step of one case, and its FLOPs."""
    sizes = {key: case[key] for key in ("n_layer", "n_embd", "n_head")}
    cfg = shape_of("tiny", case["block"], **sizes)
    x, y = draw_batch(case["vocab"], case["batch"], case["block"], device)
    kernels = Kernels.torch if mode == "full" else backends(device)[-1]
    flops = GPT(cfg, case["vocab"]).flops_per_token() * x.numel()
    return ours(cfg, "rmsnorm", kernels, mode, x, y, case["vocab"]), flops


def measure(options: Options, device: torch.device) -> Iterator[dict]:
    for axis, changes in AXES.items():
        cases = [BASE | change for change in changes]
        timed = [contestant(case, options.compile, device) for case in cases]
        interleave([one for one, _ in timed], options.steps, device)
        before = None
        for change, (one, flops) in zip(changes, timed, strict=True):
            now = {"ms": float(np.median(one.ms)), "peak_mib": peak_mib(one.step, device), "flops": flops}
            grew = {f"{key}_grew": before and round(value / before[key], 2) for key, value in now.items()}
            yield {"axis": axis, "value": next(iter(change.values()))} | {k: round(v, 2) for k, v in now.items()} | grew
            before = now
        torch.compiler.reset()


def render(rows: list[dict]) -> str:
    def cell(value, form: str) -> str:
        return "-" if value is None else form.format(value)

    body = []
    for r in rows:
        grew = {key: cell(r[f"{key}_grew"], "x{:.2f}") for key in ("ms", "peak_mib", "flops")}
        sizes = f"{r['ms']:.1f}", grew["ms"], f"{r['peak_mib']:.0f}", grew["peak_mib"]
        body.append([r["axis"], str(r["value"]), *sizes, f"{r['flops'] / 1e9:.1f}", grew["flops"]])
    return table([["axis", "value", "step ms", "grew", "peak MiB", "grew", "GFLOPs", "grew"], *body])


def main(options: Options) -> None:
    if options.steps < 1 or options.compile not in ("eager", "full"):
        raise UserError("steps must be at least 1, and compile=eager or full")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    keep_freed_memory()
    make_deterministic(device.type)
    rows = list(measure(options, device))
    print(render(rows))
    if options.to:
        write(options.to, rows)


if __name__ == "__main__":
    run_script(main, Options, __doc__)
