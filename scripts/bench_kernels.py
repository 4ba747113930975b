"""Times every kernel on a GPU against PyTorch, torch.compile and liger-kernel, as fractions of what a copy reaches.

python -m scripts.bench_kernels [to=kernels.json] [seconds=600] [dtype=bf16|fp16|fp32]
python -m scripts.bench_kernels [target=sm_90|sm_80|sm_100|gfx942]      without a GPU: what the compiler says instead

Rows x columns: 2²⁶ elements at 256 to 65536 columns, and 4096 rows of 768, 1024 and 4096. `seconds` bounds the whole:
ours and PyTorch's come first, and what is left over is printed as not measured.
"""

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._functorch.config

from errors import UserError
from scripts import compile_ahead
from scripts.bench_dispatch import microseconds
from scripts.kernel_cases import DTYPES, TORCH, Case, liger
from scripts.options import run_script
from scripts.results import read, table, write

NAMES = tuple(TORCH)
VOLUME = 2**26
SIZES = [(VOLUME // n, n) for n in (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)]
SIZES += [(4096, n) for n in (768, 1024, 4096)]
HOST_SIZE = (8, 1024)
SLEEP_CYCLES = 1_000_000  # more than half a millisecond
IMPLEMENTATIONS = ("normgpt", "torch", "liger", "compiled")


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


def directions(case: Case, which: str, device: str) -> dict[str, Callable]:
    """{"forward": a call, "backward": the gradients of one forward, over and over}; {} where nothing is timed."""
    function = implementation(which, case)
    if function is None:
        return {}
    inputs = case.inputs(device)
    if which == "liger":  # it would copy the halves of one matrix, and be timed for that
        inputs = {k: t.detach().contiguous().requires_grad_(t.requires_grad) for k, t in inputs.items()}
    outputs = case.call(function, inputs)
    leaves, dys = [t for t in inputs.values() if t.requires_grad], [torch.randn_like(y) for y in outputs]
    return {
        "forward": lambda: case.call(function, inputs),
        "backward": lambda: torch.autograd.grad(outputs, leaves, dys, retain_graph=True),
    }


@functools.cache
def copy_gb_per_s(n_bytes: int, device: str) -> float:
    """Of a copy that moves as many bytes, half of them read and half written."""
    source = torch.empty(n_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    milliseconds, *_ = device_milliseconds(lambda: target.copy_(source), device)
    return 2 * source.numel() / milliseconds / 1e6


def times(case: Case, which: str, device: str) -> dict[str, tuple]:
    """{direction: device_milliseconds}; an opponent that fails is reported and left out, ours is not."""
    try:
        return {direction: device_milliseconds(fn, device) for direction, fn in directions(case, which, device).items()}
    except Exception as error:
        if which == "normgpt":
            raise
        print(f"{which}, {case.label}, {case.n_rows} x {case.n_cols}: {error!r}"[:300], flush=True)
        return {}


def measure(cases: list[Case], which: str, device: str, until: float) -> Iterator[dict]:
    """A row for each case and direction; None for what failed, what there was no time for, or no implementation."""
    for case in cases:
        measured = times(case, which, device) if time.monotonic() < until else {}
        for direction in ("forward", "backward"):
            n_bytes, ms = case.n_bytes(direction), measured.get(direction)
            copied = copy_gb_per_s(n_bytes, device)
            row = {"kernel": case.label, "direction": direction, "n_rows": case.n_rows, "n_cols": case.n_cols}
            row |= {"dtype": case.dtype, "implementation": which, "copy_gb_per_s": round(copied, 1)}
            row |= dict(zip(("ms", "ms_p10", "ms_p90"), ms or (None,) * 3, strict=True))
            row["gb_per_s"] = ms and round(n_bytes / ms[0] / 1e6, 1)
            row["fraction_of_copy"] = ms and round(n_bytes / ms[0] / 1e6 / copied, 3)
            yield row


def host_times(cases: list[Case], device: str) -> dict[tuple[str, str, str], float]:
    """{(kernel, direction, implementation): microseconds}: what a call costs the CPU, launch included."""
    host = {}
    for case in cases:
        for which in ("normgpt", "torch"):
            for direction, fn in directions(case, which, device).items():
                host[case.label, direction, which] = round(microseconds(fn, rounds=5), 1)
                if device == "cuda":
                    torch.cuda.synchronize()
    return host


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


def run(names, sizes, dtype: str, device: str, seconds: float) -> Iterator[list[dict]]:
    """The rows so far, after each implementation."""
    # torch.compile would else free what a second backward needs
    torch._functorch.config.donated_buffer = False
    until, rows = time.monotonic() + seconds, []
    cases = [Case(name, *size, dtype, bias=name == "layer_norm") for name in names for size in sizes]
    small = [Case(name, *HOST_SIZE, dtype, bias=name == "layer_norm") for name in names]
    host = host_times(small, device)
    for which in IMPLEMENTATIONS:
        for row in measure(cases, which, device, until):
            rows.append(row | {"host_us": host.get((row["kernel"], row["direction"], which))})
        yield rows


def main(options: Options) -> None:
    if options.dtype not in DTYPES:
        raise UserError(f"dtype={options.dtype} must be one of {', '.join(DTYPES)}")
    if not torch.cuda.is_available():
        print("No GPU here. What the compiler says of the kernels, unrun:\n")
        compile_ahead.main(compile_ahead.Options(target=options.target, to=options.to))
        return
    to = Path(options.to or "kernels.json")
    for rows in run(NAMES, SIZES, options.dtype, "cuda", options.seconds):
        write(to, rows)
    print(render(read(to)))
    drawn = draw(rows, to.with_suffix(".png"))
    print(f"\n{to}" + (f", {to.with_suffix('.png')}" if drawn else "; no picture, since matplotlib is not installed"))
    missing = sum(row["ms"] is None and row["implementation"] != "liger" for row in rows)
    if missing:
        print(f"{missing} measurements were left out after seconds={options.seconds}")


if __name__ == "__main__":
    run_script(main, Options, __doc__)
