"""Times every kernel on a GPU against PyTorch, torch.compile and liger-kernel, as fractions of what a copy reaches.

python -m scripts.bench_kernels [to=kernels.json] [seconds=600] [dtype=bf16|fp16|fp32]
python -m scripts.bench_kernels [target=sm_90|sm_80|sm_100|gfx942]      without a GPU: what the compiler says instead

Rows x columns: 2²⁶ elements at 256 to 65536 columns, and 4096 rows of 768, 1024 and 4096. `seconds` bounds the whole:
ours and PyTorch's come first, and what is left over is printed as not measured.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._functorch.config

from errors import UserError
from scripts import compile_ahead
from scripts.kernel_cases import DTYPES, TORCH, Case, liger, read, table, write
from scripts.options import run_script

NAMES = tuple(TORCH)
VOLUME = 2**26
SIZES = [(VOLUME // n, n) for n in (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)]
SIZES += [(4096, n) for n in (768, 1024, 4096)]
HOST_SIZE = (8, 1024)
SLEEP_CYCLES = 500_000  # a third of a millisecond
IMPLEMENTATIONS = ("normgpt", "torch", "compiled", "liger")


@dataclass
class Options:
    to: str | None = None
    seconds: int = 600
    dtype: str = "bf16"
    target: str = "sm_90"


def device_milliseconds(fn: Callable, device: str, calls: int = 30) -> tuple[float, float, float]:
    """Median, p10, p90 of one call on the device, its cache flushed before.

    The device sleeps before each call while the host goes ahead, so that what the host takes does not count.
    """
    fn()  # compiles
    if device != "cuda":
        times = sorted(timed(fn) for _ in range(3))
        return times[1], times[0], times[2]
    flush = torch.empty(2**28, dtype=torch.uint8, device=device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
    for start, end in events:
        flush.zero_()
        torch.cuda._sleep(SLEEP_CYCLES)
        start.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in events)
    return times[calls // 2], times[calls // 10], times[-1 - calls // 10]


def timed(fn: Callable) -> float:
    start = time.perf_counter()
    fn()
    return (time.perf_counter() - start) * 1e3


def host_microseconds(fn: Callable, device: str) -> float:
    """What a call costs the CPU, launch included: the best of five rounds on inputs too small to keep a GPU busy."""
    rounds, calls = [], 200 if device == "cuda" else 1
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        rounds.append((time.perf_counter() - start) / calls * 1e6)
        if device == "cuda":
            torch.cuda.synchronize()
    return min(rounds)


def implementation(which: str, case: Case) -> Callable | None:
    """The function to time; None where there is none."""
    if which == "normgpt":
        return case.fused
    if which == "liger":
        return liger(case.name)
    if which == "torch":
        return TORCH[case.name]
    torch.compiler.reset()  # forgets the sizes before, which would count against the limit of recompilations
    return torch.compile(TORCH[case.name], fullgraph=True, dynamic=False)


def directions(case: Case, function: Callable, device: str) -> dict[str, Callable]:
    """{"forward": a call, "backward": the gradients of one forward, again and again}."""
    inputs = case.inputs(device)
    outputs = case.call(function, inputs)
    leaves, dys = [t for t in inputs.values() if t.requires_grad], [torch.randn_like(y) for y in outputs]
    return {
        "forward": lambda: case.call(function, inputs),
        "backward": lambda: torch.autograd.grad(outputs, leaves, dys, retain_graph=True),
    }


def copy_gb_per_s(n_bytes: int, device: str) -> float:
    """Of a copy that moves as many bytes, half of them read and half written."""
    source = torch.empty(n_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    milliseconds, *_ = device_milliseconds(lambda: target.copy_(source), device)
    return 2 * source.numel() / milliseconds / 1e6


def measure(cases: list[Case], device: str, until: float) -> Iterator[dict]:
    """A row for each implementation, case and direction; None for what there was no time for, or no implementation."""
    copies: dict[int, float] = {}
    for which in IMPLEMENTATIONS:
        for case in cases:
            function = implementation(which, case) if time.monotonic() < until else None
            calls = {} if function is None else directions(case, function, device)
            for direction in ("forward", "backward"):
                n_bytes = case.n_bytes(direction)
                if n_bytes not in copies:
                    copies[n_bytes] = copy_gb_per_s(n_bytes, device)
                row = {"kernel": case.label, "direction": direction, "n_rows": case.n_rows, "n_cols": case.n_cols}
                row |= {"dtype": case.dtype, "implementation": which, "copy_gb_per_s": round(copies[n_bytes], 1)}
                times = device_milliseconds(calls[direction], device) if calls else None
                row |= dict(zip(("ms", "ms_p10", "ms_p90"), times or (None,) * 3, strict=True))
                row["gb_per_s"] = times and round(n_bytes / times[0] / 1e6, 1)
                row["fraction_of_copy"] = times and round(row["gb_per_s"] / copies[n_bytes], 3)
                yield row


def host_times(cases: list[Case], device: str) -> dict[tuple[str, str, str], float]:
    """{(kernel, direction, implementation): microseconds} of ours and PyTorch's."""
    return {
        (case.label, direction, which): round(host_microseconds(fn, device), 1)
        for case in cases
        for which in ("normgpt", "torch")
        for direction, fn in directions(case, implementation(which, case), device).items()
    }


def render(rows: list[dict]) -> str:
    """One line for each kernel, direction and size: GB/s of ours, fraction of the copy of each, host time of ours."""
    head = ["kernel", "direction", "M", "N", "GB/s", *(f"{w} / copy" for w in IMPLEMENTATIONS), "host µs", "torch's"]
    by_line: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        line = (row["kernel"], row["direction"], row["n_rows"], row["n_cols"])
        by_line.setdefault(line, {})[row["implementation"]] = row

    def shown(value):
        return "-" if value is None else str(value)

    lines = [
        [*map(str, line), shown(of["normgpt"]["gb_per_s"])]
        + [shown(of[which]["fraction_of_copy"]) for which in IMPLEMENTATIONS]
        + [shown(of[which]["host_us"]) for which in ("normgpt", "torch")]
        for line, of in by_line.items()
    ]
    return table([head, *lines])


def draw(rows: list[dict], path: Path) -> bool:
    """A panel for each kernel and direction, fraction of the copy over columns; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["kernel"] for row in rows))
    figure, axes = plt.subplots(len(names), 2, figsize=(11, 2.6 * len(names)), sharex=True, sharey=True, squeeze=False)
    for (i, name), (j, direction) in ((a, b) for a in enumerate(names) for b in enumerate(("forward", "backward"))):
        panel = axes[i][j]
        for which in IMPLEMENTATIONS:
            here = [r for r in rows if (r["kernel"], r["direction"], r["implementation"]) == (name, direction, which)]
            here = [r for r in here if r["fraction_of_copy"] is not None and r["n_rows"] * r["n_cols"] >= VOLUME]
            if here:
                panel.plot([r["n_cols"] for r in here], [r["fraction_of_copy"] for r in here], marker="o", label=which)
        panel.set(title=f"{name}, {direction}", xscale="log", ylim=(0, 1.1))
        panel.grid(alpha=0.3)
    axes[0][0].legend()
    figure.supxlabel(f"columns, at {VOLUME:,} elements")
    figure.supylabel("bytes per second, as a fraction of a copy's")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def run(names, sizes, dtype: str, device: str, seconds: float) -> list[dict]:
    # torch.compile would else free what a second backward needs
    torch._functorch.config.donated_buffer = False
    until = time.monotonic() + seconds
    cases = [Case(name, *size, dtype, bias=name == "layer_norm") for name in names for size in sizes]
    small = [Case(name, *HOST_SIZE, dtype, bias=name == "layer_norm") for name in names]
    host = host_times(small, device)
    return [
        row | {"host_us": host.get((row["kernel"], row["direction"], row["implementation"]))}
        for row in measure(cases, device, until)
    ]


def main(options: Options) -> None:
    if options.dtype not in DTYPES:
        raise UserError(f"dtype={options.dtype} must be one of {', '.join(DTYPES)}")
    if not torch.cuda.is_available():
        print("No GPU here. What the compiler says of the kernels, unrun:\n")
        compile_ahead.main(compile_ahead.Options(target=options.target, to=options.to))
        return
    to = Path(options.to or "kernels.json")
    rows = run(NAMES, SIZES, options.dtype, "cuda", options.seconds)
    write(to, rows)
    print(render(read(to)))
    drawn = draw(rows, to.with_suffix(".png"))
    print(f"\n{to}" + (f", {to.with_suffix('.png')}" if drawn else "; no picture, since matplotlib is not installed"))
    missing = sum(row["ms"] is None and row["implementation"] != "liger" for row in rows)
    if missing:
        print(f"{missing} measurements were left out after seconds={options.seconds}")


if __name__ == "__main__":
    run_script(main, Options, __doc__)
