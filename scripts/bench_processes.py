"""What several processes gain over one, and what checkpoints cost a step; start it by torchrun.

torchrun --nproc_per_node=2 -m scripts.bench_processes [model=tiny] [rounds=60] [to=results/cpu/processes.json]

The same global batch by one process with one thread, by all under ddp, and by all under fsdp: blocks of ten steps, in
turns, in the same processes, of which all but the first rest where one trains. Then blocks of ten steps with a
checkpoint in each or none, written beside the steps as train.py does, or before they go on.
"""

from training.process import keep_freed_memory  # before torch  # isort: skip

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from compare.stats import median_interval
from configs.schema import Config
from configs.twin import composed
from data.tokens import open_tokens
from errors import UserError
from scripts.options import run_script
from scripts.results import table, write
from train import build_batches
from training.config import Dtype, Strategy
from training.device import fastest_kernels, make_deterministic
from training.distributed import ALONE, Group, World, joined
from training.run import Run

STEPS = 10


@dataclass
class Options:
    model: str = "tiny"
    rounds: int = 60
    to: str | None = None


def config(options: Options, strategy: str, folder: str) -> Config:
    """train.py's defaults."""
    place = [f"runs_dir={folder}", f"name={strategy}", f"dist.strategy={strategy}"]
    cfg = composed(f"model={options.model}", "norm=rmsnorm", "compile=eager", "device=cpu", *place)
    cfg.dtype = Dtype.float32
    cfg.kernels = fastest_kernels(cfg)
    return cfg


def block(run: Run, batches: Callable, world: World, save: str = "") -> float:
    """Milliseconds a step, over STEPS steps, with a checkpoint at their beginning where asked."""
    began = time.perf_counter()
    for step in range(STEPS):
        x, y = (torch.from_numpy(tokens) for tokens in batches(step, world.rank, world.size))
        run.ms_by(time.perf_counter, step, x, y)
        if save and step == 0:
            run.save(1)
            if save == "waiting":
                run.writer.finish()
    run.writer.wait()  # what is not written by the next one would be waited for there
    return 1e3 * (time.perf_counter() - began) / STEPS


def in_turns(cases: dict[str, Callable[[], float]], rounds: int, world: World) -> dict[str, list[float]]:
    """Milliseconds of each case's blocks; the order is turned from round to round, and nobody runs ahead."""
    ms = {name: [] for name in cases}
    for n in range(rounds + 1):
        for name in list(cases)[:: 1 if n % 2 == 0 else -1]:
            world.gathered(lambda: None)
            ms[name].append(cases[name]())
    return {name: times[1:] for name, times in ms.items()}


def rows(ms: dict[str, list[float]], tokens: int, against: str) -> list[dict]:
    """Each case's times, and its step time over that of the case `against`, in pairs, with the median's interval."""
    found = []
    for name, times in ms.items():
        p10, median, p90 = np.percentile(times, [10, 50, 90])
        row = {"case": name, "ms": median, "ms_p10": p10, "ms_p90": p90, "tokens_per_s": tokens / median * 1e3}
        ratios = np.array(times) / ms[against]
        low, high = median_interval(ratios) or (None, None) if name != against else (None, None)
        row |= {"against": against, "ratio": float(np.median(ratios)), "low": low, "high": high}
        found.append({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
    return found


def render(rows: list[dict]) -> str:
    lines = [["", "ms/step", "p10", "p90", "tokens/s", "step time over that of", "", "95 %"]]
    for r in rows:
        ratio = [f"{r['ratio']:.3f}", f"{r['low']:.3f} to {r['high']:.3f}" if r["low"] else "-"]
        times = [f"{r[key]:.1f}" for key in ("ms", "ms_p10", "ms_p90")]
        lines.append([r["case"], *times, f"{r['tokens_per_s']:,.0f}", r["against"], *ratio])
    return table(lines)


def main(options: Options) -> None:
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        raise UserError("start it by torchrun --nproc_per_node=2 -m scripts.bench_processes")
    make_deterministic("cpu")
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        configs = [config(options, strategy, folder) for strategy in ("none", "ddp", "fsdp")]
        with joined(configs[1]) as world:
            found = measure(options, configs, [ALONE, world, Group(configs[2].dist, Strategy.fsdp, "cpu", world.store)])
            if world.first:
                print(render(found))
                if options.to:
                    write(options.to, found)


def measure(options: Options, configs: list[Config], worlds: list[World]) -> list[dict]:
    cfg, (alone, world, _) = configs[0], worlds
    data = world.in_turn(lambda: open_tokens(cfg.data, world.say))
    batches, _ = build_batches(cfg, data)
    runs = [Run(cfg, data, world) for cfg, world in zip(configs, worlds, strict=True)]

    def training(run: Run, threads: int, save: str = "") -> Callable[[], float]:
        def one() -> float:
            torch.set_num_threads(threads)
            here = world.first or run.world is not alone
            return block(run, batches, run.world, save) if here else 0.0

        return one

    names = ["one process, one thread", *(f"{cfg.dist.strategy}, {world.size} processes" for cfg in configs[1:])]
    processes = {name: training(run, threads=1) for name, run in zip(names, runs, strict=True)}
    cores = os.cpu_count() or 1
    saving = {
        f"one process, {cores} threads, {name}": training(runs[0], cores, save)
        for name, save in (
            ("no checkpoint", ""),
            ("checkpoint.every=10", "beside"),
            ("the same, waited for", "waiting"),
        )
    }
    tokens = cfg.train.batch_size * cfg.model.block_size
    found = []
    for cases in (processes, saving):
        ms = in_turns(cases, options.rounds, world)
        if world.first:
            found += rows(ms, tokens, next(iter(cases)))
    return found


if __name__ == "__main__":
    run_script(main, Options, __doc__)
