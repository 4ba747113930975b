"""Times whole training steps: ours by norm, kernels and compilation, other libraries' of one shape, and their floor.

python -m scripts.bench_train [to=train.json] [model=tiny] [block=64] [batch=12] [vocab=256] [steps=100]
    [norm=layernorm,rmsnorm,identity] [kernels=plain,torch,cpu] [compile=eager,block,full] [peers=transformers,litgpt]

Only what is named runs, or all that can. The steps of all are interleaved in one process, on one batch. A step is
forward, backward, clipping and fused AdamW; the floor is its matrix products alone. `identity` is no norm at all:
what a step takes above it is what the norm costs. Peak memory is what one step holds beyond weights and moments.
"""

from training.process import keep_freed_memory  # before torch  # isort: skip

from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import numpy as np
import torch

from compare.stats import step_time_ratio
from errors import UserError, near
from kernels.cpu import CannotBuild, library
from model.config import Kernels, ModelConfig, NormKind
from model.gpt import GPT
from scripts.contestants import (
    PEERS,
    Contestant,
    draw_batch,
    interleave,
    matrix_products,
    norm_alone,
    ours,
    peak_mib,
    shape_of,
    theirs,
)
from scripts.options import run_script
from scripts.results import read, table, write
from training.device import make_deterministic
from training.timing import peak_flops


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
MODES = ["eager", "block", "full"]


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
    batch = draw_batch(options.vocab, options.batch, options.block, device)
    norms, kernels = chosen("norm", options.norm, list(NormKind)), chosen("kernels", options.kernels, backends(device))
    modes, peers = chosen("compile", options.compile, MODES), chosen("peers", options.peers, list(PEERS))
    found = [
        ours(cfg, norm, kernel, mode, *batch, options.vocab)
        for norm, kernel, mode in product(norms, kernels, modes)
        if kernel != Kernels.cpu or mode == "eager"  # torch.compile makes kernels of its own
    ]
    for peer in peers:
        if find_spec(peer):
            found += [theirs(peer, cfg, mode, *batch, options.vocab) for mode in modes if mode != "block"]
        else:
            print(f"without {peer}, which is not installed")
    alone = [norm_alone(cfg, norm, kernel, options.batch, device) for norm, kernel in product(norms, kernels)]
    return [*found, *alone, matrix_products(cfg, options.vocab, options.batch, device)]


# the table


def row(one: Contestant, everyone: list[Contestant], options: Options, flops: float | None, mib: float) -> dict:
    """What was measured of one, beside the floor, the fastest of other libraries and the step without a norm."""
    p10, median, p90 = np.percentile(one.ms, [10, 50, 90])
    values = one.about | {"ms": median, "ms_p10": p10, "ms_p90": p90, "peak_mib": round(mib, 1)}
    is_step = name_of(one) in ("normgpt", *PEERS)
    peers = [c for c in everyone if name_of(c) in PEERS]
    bare = [c for c in everyone if c.about == one.about | {"norm": "identity"}]
    peer = min(peers, key=lambda c: np.median(c.ms), default=None)
    values |= interval("over_floor", is_step and over(one, everyone[-1]))
    values |= interval("over_peer", is_step and peer and over(one, peer))
    values |= interval("norm_share", is_step and bare and 1 - over(bare[0], one)[::-1])
    values["tokens_per_s"] = is_step and round(1e3 * options.batch * options.block / median)
    values["mfu"] = is_step and flops and 1e3 * flops / median
    return {k: round(v, 4) if isinstance(v, float) else v or None for k, v in values.items()}


def name_of(one: Contestant) -> str:
    """Without its version."""
    return one.about["implementation"].split()[0]


def over(one: Contestant, other: Contestant) -> np.ndarray:
    """Lower end, median and upper end of the ratio of paired steps, as between twins."""
    ratio = step_time_ratio(np.array(other.ms), np.array(one.ms))
    return np.array([ratio.interval[0], ratio.median, ratio.interval[1]])


def interval(key: str, found) -> dict[str, float | None]:
    low, median, high = map(float, found) if isinstance(found, np.ndarray) else (None, None, None)
    return {f"{key}_low": low, key: median, f"{key}_high": high}


COLUMNS = {
    "step ms": ("ms", "{:.2f}"),
    "p10": ("ms_p10", "{:.2f}"),
    "p90": ("ms_p90", "{:.2f}"),
    "/ floor": ("over_floor", "{:.2f}"),
    "/ fastest peer": ("over_peer", "{:.2f}"),
    "norm's share": ("norm_share", "{:.1%}"),
    "peak MiB": ("peak_mib", "{:.0f}"),
    "tokens/s": ("tokens_per_s", "{:,}"),
    "MFU": ("mfu", "{:.1%}"),
}


def render(rows: list[dict]) -> str:
    names = ["implementation", "norm", "kernels", "compile"]
    body = [
        [*(r[name] or "" for name in names)]
        + ["-" if r[key] is None else form.format(r[key]) for key, form in COLUMNS.values()]
        for r in rows
    ]
    return table([["", *names[1:], *COLUMNS], *body])


def draw(rows: list[dict], path: Path) -> None:
    """A bar a step, with p10 to p90, above that of the matrix products; equal rows give equal bytes."""
    from matplotlib.figure import Figure

    from compare.figures import DPI, in_style

    steps = [r for r in rows if r["over_floor"]]
    with in_style():
        figure = Figure(figsize=(8, 1 + 0.28 * len(steps)), layout="constrained")
        axes = figure.subplots()
        for r in steps:
            label = " ".join(filter(None, (r["implementation"], r["norm"], r["kernels"], r["compile"])))
            spread = [[r["ms"] - r["ms_p10"]], [r["ms_p90"] - r["ms"]]]
            colour = "C0" if r["implementation"] == "normgpt" else "C1"
            axes.barh(label, r["ms"], xerr=spread, color=colour, height=0.7, error_kw={"linewidth": 1})
        axes.axvline(rows[-1]["ms"], color="black", linestyle="--", linewidth=1)
        axes.set(xlabel="ms a step, median, p10 to p90; dashed: its matrix products alone", ylim=(len(steps), -1))
        figure.savefig(path, format="png", dpi=DPI, metadata={"Software": "normgpt"})


def main(options: Options) -> None:
    if options.steps < 100:
        raise UserError(f"steps={options.steps} must be at least 100, for the ratios to have an interval")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given = {key: value for key, value in vars(options).items() if value is not None}
    options = Options(**DEFAULTS[device.type] | given)
    cfg = shape_of(options.model, options.block)
    keep_freed_memory()
    make_deterministic(device.type)
    everyone = contestants(cfg, options, device)
    interleave(everyone, options.steps, device)
    peak = peak_flops(device, "bfloat16")
    flops = peak and GPT(cfg, options.vocab).flops_per_token() * options.batch * options.block / peak
    rows = [row(one, everyone, options, flops, peak_mib(one.step, device)) for one in everyone]
    print(render(rows))
    if options.to:
        write(options.to, rows)
        draw(read(options.to), Path(options.to).with_suffix(".png"))


if __name__ == "__main__":
    run_script(main, Options, __doc__)
