"""What an eager call costs the CPU before its kernel starts: everything but the launch, which is stubbed out.

TRITON_INTERPRET=1 python -m scripts.bench_dispatch [to=FILE.json]

Beside each kernel, PyTorch's own operators on eight short rows, their work included, and the registered operator that
torch.compile sees, without autograd. The best of many short rounds, for a busy machine only ever adds.
"""

import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kernels import glu, norm, rotary
from scripts.kernel_cases import TORCH, Case, device
from scripts.options import run_script
from scripts.results import table, write

ROUNDS, CALLS = 100, 100


@dataclass
class Options:
    to: str | None = None


class Stub:
    """A kernel that takes any launch and does nothing."""

    def __getitem__(self, grid):
        return "".format  # the cheapest function that takes any arguments


@contextmanager
def stubbed():
    """All kernels replaced by stubs."""
    kept = [(m, name, f) for m in (norm, glu, rotary) for name, f in vars(m).items() if name.endswith("_kernel")]
    plans = (norm._forward_plan, norm._backward_plan)  # they hold kernels
    for module, name, _ in kept:
        setattr(module, name, Stub())
    for plan in plans:
        plan.cache_clear()
    try:
        yield
    finally:
        for module, name, function in kept:
            setattr(module, name, function)
        for plan in plans:
            plan.cache_clear()


def microseconds(fn: Callable, rounds: int = ROUNDS) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(CALLS):
            fn()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    return min(times)


def registered(case: Case, inputs: dict[str, torch.Tensor]) -> Callable:
    """The operator that stands for the kernel while compiling, as an eager call would pay for it."""
    ops = torch.ops.normgpt
    if case.name == "swiglu":
        return lambda: ops.swiglu_forward(*inputs.values())
    if case.name == "rope":
        return lambda: ops.rope(*inputs.values(), False)
    tensors = [inputs.get(name) for name in ("x", "residual", "weight", "bias")]
    return lambda: ops.norm_forward(*tensors, 1e-5, case.name.endswith("layer_norm"), False)


def measure(name: str, device: str, rounds: int = ROUNDS) -> dict:
    """Microseconds of a call that records a gradient: ours, the registered operator's, PyTorch's."""
    case = Case(name, 8, 64, "fp32", bias=name.endswith("layer_norm"))
    inputs = case.inputs(device)
    with stubbed():
        ours = microseconds(lambda: case.fused(**inputs), rounds)
        operator = microseconds(registered(case, inputs), rounds)
    torchs = microseconds(lambda: TORCH[name](**inputs), rounds)
    times = {"normgpt_us": ours, "operator_us": operator, "torch_us": torchs}
    return {"kernel": case.label} | {key: round(value, 1) for key, value in times.items()}


def render(rows: list[dict]) -> str:
    head = ["kernel", "dispatch µs", "registered operator µs", "PyTorch's own µs"]
    return table([head, *([str(value) for value in row.values()] for row in rows)])


def main(options: Options) -> None:
    where = device()
    torch.set_num_threads(1)
    rows = [measure(name, where) for name in TORCH]
    print(render(rows))
    if options.to:
        write(options.to, rows)


if __name__ == "__main__":
    run_script(main, Options, __doc__)
