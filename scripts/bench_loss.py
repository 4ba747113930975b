"""Times the head and its loss, and what they hold in memory: whole, in chunks, compiled, and by PyTorch's own function.

python -m scripts.bench_loss [to=loss.json] [tokens=8192] [width=128] [vocab=50304] [steps=5]

Forward and backward, to the gradients of stream and head. Steps of all are interleaved.
"""

from training.process import keep_freed_memory  # before torch  # isort: skip

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from errors import UserError
from model.loss import head_loss
from scripts.contestants import Contestant, interleave, peak_mib
from scripts.options import run_script
from scripts.results import table, write


@dataclass
class Options:
    tokens: int = 8192
    width: int = 128
    vocab: int = 50304
    steps: int = 5
    to: str | None = None


def whole(x, w, targets):
    return F.cross_entropy(F.linear(x, w).float(), targets)


def contestants(options: Options, device: torch.device) -> list[Contestant]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(options.tokens, options.width, device=device, dtype=dtype, requires_grad=True)
    w = (0.02 * torch.randn(options.vocab, options.width, device=device, dtype=dtype)).requires_grad_()
    targets = torch.randint(options.vocab, (options.tokens,), device=device)
    losses = {
        "all logits": whole,
        "in chunks (model/loss.py)": head_loss,
        "all logits, compiled": torch.compile(whole, fullgraph=True, dynamic=False),
    }
    if hasattr(F, "linear_cross_entropy"):  # from PyTorch 2.13
        chunked = torch.nn.LinearCrossEntropyOptions()
        losses["torch's linear_cross_entropy"] = lambda x, w, t: F.linear_cross_entropy(x, w, t, options=chunked)

    def step_of(loss_of):
        return lambda: torch.autograd.grad(loss_of(x, w, targets), (x, w))

    return [Contestant({"loss": name}, step_of(loss_of)) for name, loss_of in losses.items()]


def rows_of(everyone: list[Contestant], device: torch.device) -> list[dict]:
    first, rows = None, []
    for one in everyone:
        now = {"ms": float(np.median(one.ms)), "peak_mib": peak_mib(one.step, device)}
        first = first or now
        of_whole = {f"{key}_of_whole": round(value / first[key], 3) for key, value in now.items()}
        rows.append(one.about | {key: round(value, 1) for key, value in now.items()} | of_whole)
    return rows


def render(rows: list[dict]) -> str:
    forms = {"ms": "{:.0f}", "ms_of_whole": "{:.2f}", "peak_mib": "{:.0f}", "peak_mib_of_whole": "{:.2f}"}
    body = [[r["loss"], *(form.format(r[key]) for key, form in forms.items())] for r in rows]
    return table([["loss", "ms", "of all logits", "peak MiB", "of all logits"], *body])


def main(options: Options) -> None:
    if min(options.tokens, options.width, options.vocab, options.steps) < 1:
        raise UserError("tokens, width, vocab and steps must be at least 1")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    keep_freed_memory()
    everyone = contestants(options, device)
    interleave(everyone, options.steps, device)
    rows = rows_of(everyone, device)
    print(render(rows))
    if options.to:
        write(options.to, rows)


if __name__ == "__main__":
    run_script(main, Options, __doc__)
