"""Holds every kernel to its plain twin at real sizes, in three dtypes, beyond 2³¹ elements; ends with 1 if one fails.

python -m scripts.check_kernels [to=FILE.json]          minutes on a GPU, most of them compiling

Meant for a GPU; on a CPU with TRITON_INTERPRET=1 it takes small sizes.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels import reference
from scripts.kernel_cases import DTYPES, TORCH, Case, device
from scripts.options import run_script
from scripts.results import table, write

NAMES = tuple(TORCH)
# ours to read, odd, and on both sides of every width at which the launch changes
SIZES = [(4096, 768), (4096, 1024), (1000, 1002), (4096, 4096), (333, 8192), (129, 8194), (64, 32768), (37, 65536)]
VARIED = [(4096, 768), (129, 16384)]
SMALL = [(5, 64), (3, 1002)]
LARGE = [(2**31 // 4096 + 2048, 4096), (2**31 // 16384 + 2048, 16384)]
EDGE = 8  # rows looked at on each end of the large tensors


@dataclass
class Options:
    to: str | None = None


def worst(ours: Tensor, theirs: Tensor, truth: Tensor, slack: float = 1, n_terms: int = 1) -> tuple[float, float]:
    """(error, allowed): off the float64 truth by at most twice the twin's error and `slack` units of the largest value.

    A sum over n_terms rows, whose order is free, gets √n_terms times the slack.
    """
    if not truth.numel():
        return 0.0, 0.0
    error, yardstick = ((t.double() - truth).abs().max().item() for t in (ours, theirs))
    unit = torch.finfo(ours.dtype).eps * truth.abs().max().item()
    return error, 2 * yardstick + slack * n_terms**0.5 * unit


def results(case: Case, function: Callable, inputs: dict[str, Tensor], dys: list[Tensor], dtype=None) -> dict:
    """Outputs and gradients by name, computed in `dtype`."""
    leaves = {k: t.detach().to(dtype or t.dtype).requires_grad_(t.requires_grad) for k, t in inputs.items()}
    outputs = case.call(function, leaves)
    wanted = {k: t for k, t in leaves.items() if t.requires_grad}
    dys = [dy.to(y.dtype) for dy, y in zip(dys, outputs, strict=True)]
    gradients = torch.autograd.grad(outputs, list(wanted.values()), dys)
    named = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    return named | {f"d{k}": g for k, g in zip(wanted, gradients, strict=True)}


def row(case: Case, what: str, error: float, allowed: float) -> dict:
    ok = error <= allowed
    size = {"n_rows": case.n_rows, "n_cols": case.n_cols, "dtype": case.dtype}
    return {"kernel": case.label, **size, "what": what, "error": error, "allowed": allowed, "ok": ok}


def against_twin(case: Case, inputs: dict[str, Tensor], of: str = "", **options) -> Iterator[dict]:
    """Every output and gradient by the rule of `worst`, and the same bits a second time."""
    fused, twin = (partial(f, **options) for f in (case.fused, getattr(reference, case.name)))
    dys = [torch.randn_like(y) for y in case.call(twin, inputs)]
    ours, again, theirs = (results(case, f, inputs, dys) for f in (fused, fused, twin))
    exact = results(case, twin, inputs, dys, torch.float64)
    for what, truth in exact.items():
        n_terms = case.n_rows if what in ("dweight", "dbias") else 1
        yield row(case, what + of, *worst(ours[what], theirs[what], truth, n_terms=n_terms))
    yield row(case, "second run differs" + of, sum(not torch.equal(ours[k], again[k]) for k in ours), 0)


def leaf(t: Tensor) -> Tensor:
    return t.detach().requires_grad_()


def spread(t: Tensor) -> Tensor:
    """The same values, every second row of twice as many."""
    return leaf(t.repeat_interleave(2, 0)[::2]) if t.ndim > 1 else t


def check_norm_variants(case: Case, device: str) -> Iterator[dict]:
    """What the model and its options make of a norm: 1 + weight, no weight, views, a float32 stream under autocast."""
    inputs = case.inputs(device)
    yield from against_twin(case, inputs, ", zero_centered", zero_centered=True)
    yield from against_twin(case, {k: t for k, t in inputs.items() if k != "weight"}, ", no weight")
    yield from against_twin(case, {k: spread(t) for k, t in inputs.items()}, ", strided")
    if "residual" in inputs:
        wide = {k: leaf(t.float()) if k != "x" else t for k, t in inputs.items()}
        yield from against_twin(case, wide, ", all but x in float32")


def check_fused_add(case: Case, device: str) -> Iterator[dict]:
    """The add and the norm in one pass against one after the other, bit for bit."""
    inputs = case.inputs(device)
    y, h = case.fused(**inputs)
    apart = {k: t for k, t in inputs.items() if k != "residual"} | {"x": inputs["x"] + inputs["residual"]}
    alone = Case(case.name.removeprefix("add_"), case.n_rows, case.n_cols, case.dtype, case.bias)
    same = torch.equal(alone.fused(**apart), y) and torch.equal(apart["x"], h)
    yield row(case, "differs from add, then norm", int(not same), 0)


def check_compiled(case: Case, device: str) -> Iterator[dict]:
    inputs = case.inputs(device)
    dys = [torch.randn_like(y) for y in case.call(case.fused, inputs)]
    eager, compiled = (results(case, f, inputs, dys) for f in (case.fused, torch.compile(case.fused, fullgraph=True)))
    yield row(case, "compiled differs from eager", sum(not torch.equal(eager[k], compiled[k]) for k in eager), 0)


def ends(case: Case, t: Tensor) -> Tensor:
    """The first and last EDGE rows; of RoPE, the first and last positions of the first and the last batch and head."""
    if case.name == "rope":
        return t if t.ndim == 2 else torch.cat([t[:1, :1], t[-1:, -1:]])
    if t.ndim == 1:
        return t
    return torch.cat([t[:EDGE], t[-EDGE:]])


def check_large(case: Case, device: str) -> Iterator[dict]:
    """More than 2³¹ elements: the ends against the twin of the ends, under a gradient that is zero elsewhere."""
    needed = 8 * case.n_rows * case.n_cols * DTYPES[case.dtype].itemsize  # the most that are alive at once
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else needed
    if free < needed:
        yield row(case, f"beyond 2³¹: not run, it needs {needed >> 30} GiB of free memory", 0, 0)
        return
    inputs, twin = case.inputs(device), getattr(reference, case.name)
    with torch.no_grad():
        dys = [torch.zeros_like(y) for y in case.call(case.fused, inputs)]
    for dy in dys:
        if case.name == "rope":
            dy[:1, :1].normal_(), dy[-1:, -1:].normal_()
        else:
            dy[:EDGE].normal_(), dy[-EDGE:].normal_()
    ours = {k: ends(case, t) for k, t in results(case, case.fused, inputs, dys).items()}
    few = {k: ends(case, t.detach()).requires_grad_(t.requires_grad) for k, t in inputs.items()}
    few_dys = [ends(case, dy) for dy in dys]
    theirs, exact = results(case, twin, few, few_dys), results(case, twin, few, few_dys, torch.float64)
    for what, truth in exact.items():
        n_terms = 2 * EDGE if what in ("dweight", "dbias") else 1
        yield row(case, f"{what}, beyond 2³¹", *worst(ours[what], theirs[what], truth, n_terms=n_terms))


def everything(device: str) -> Iterator[dict]:
    cuda = device == "cuda"
    for name in NAMES:
        bias = name.endswith("layer_norm")
        # Triton's interpreter truncates to bfloat16, which a GPU does not
        for dtype in DTYPES if cuda else ("fp16", "fp32"):
            for size in (SIZES if dtype != "fp16" else SIZES[::4]) if cuda else SMALL:
                case = Case(name, *size, dtype, bias)
                yield from against_twin(case, case.inputs(device))
                if name.startswith("add_"):
                    yield from check_fused_add(case, device)
        if name.endswith("norm"):
            for size in VARIED if cuda else SMALL[:1]:
                yield from check_norm_variants(Case(name, *size, "bf16" if cuda else "fp16", bias), device)
        yield from check_compiled(Case(name, *(SIZES[1] if cuda else SMALL[0]), "fp32", bias), device)
        for size in LARGE if cuda else []:
            yield from check_large(Case(name, *size, bias=bias), device)


def run(to: str | None) -> int:
    """Prints what fails and how much holds, keeps all of it in `to`; the number that fail."""
    rows = list(everything(device()))
    if to:
        write(to, rows)
    failed = [r for r in rows if not r["ok"]]
    head = ["kernel", "n_rows", "n_cols", "dtype", "what", "error", "allowed"]
    if failed:
        print(table([head, *([str(r[key]) for key in head] for r in failed)]) + "\n")
    not_run = [r for r in rows if "not run" in r["what"]]
    for r in not_run:
        print(f"{r['kernel']}: {r['what']}")
    print(f"{len(rows) - len(failed) - len(not_run)} comparisons hold, {len(failed)} fail")
    return len(failed)


def main(options: Options) -> None:
    if run(options.to):
        sys.exit(1)


if __name__ == "__main__":
    run_script(main, Options, __doc__)
