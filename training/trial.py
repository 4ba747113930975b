"""compile=auto on a CPU: eager or compiled, whichever ends this run sooner, by a short trial of its own steps.

The answer is kept in the user's cache. Runs that differ in norm, placement or seed alone get the same one, today and
tomorrow, so that nothing else comes between them.
"""

import contextlib
import hashlib
import json
import os
import statistics
import time
from dataclasses import asdict, replace

import torch
from torch import Tensor

from data.loader import TrainBatches
from data.tokens import TokenData
from files import write_json
from kernels.cpu import cache_folder
from model.config import Kernels
from training.config import Compile
from training.device import fastest_kernels
from training.environment import cpu_name, machine
from training.run import Run

SHORT = 300  # seconds of eager steps; a run as short ends before compiling has paid
STEPS, WARMUP, MOST_SECONDS = 20, 2, 20
GAIN = 0.05  # of a step; less is within what a trial cannot tell


def settle_compile(configs: list, data: TokenData, batches: TrainBatches, say=print) -> dict | None:
    """Replaces compile=auto and kernels=auto of one run or of twins by one answer; returns the trial, if there was one.

    {"chosen", "why": in words}, and where steps were timed {"eager_ms", "full_ms", "compile_s"}, of which the last two
    are None where nothing was compiled.
    """
    if known := next((cfg for cfg in configs if cfg.compile != Compile.auto), None):
        for cfg in configs:  # a twin that was killed before it had a folder
            if cfg.compile == Compile.auto:
                cfg.compile, cfg.kernels = known.compile, known.kernels
        return None
    cfg = configs[0]
    if cfg.kernels in (Kernels.cpu, Kernels.triton):
        trial = {"chosen": Compile.eager, "why": f"kernels={cfg.kernels} are for eager steps"}
    elif not (trial := _remembered(cfg, data.vocab_size)):
        trial = _try(cfg, data, batches, say)
        if not trial.pop("failed", False):
            trial = _keep(cfg, data.vocab_size, trial)
    for cfg in configs:
        _settle(cfg, Compile(trial["chosen"]))
    return trial


def _settle(cfg, choice: Compile) -> None:
    cfg.compile = choice
    if cfg.kernels == Kernels.auto:
        cfg.kernels = fastest_kernels(cfg)


def _question(cfg, vocab_size: int) -> dict:
    """All that the answer depends on: neither norm nor placement."""
    model = {key: value for key, value in asdict(cfg.model).items() if key not in ("norm", "placement")}
    batch = cfg.train.batch_size, cfg.train.accumulate
    kernels = fastest_kernels(cfg) if cfg.kernels == Kernels.auto else cfg.kernels
    return {
        "model": model, "vocab_size": vocab_size, "batch": batch, "steps": cfg.train.steps, "dtype": cfg.dtype,
        "kernels": kernels, "torch": torch.__version__, "cpu": cpu_name(), "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }  # fmt: skip


def _file(cfg, vocab_size: int):
    question = json.dumps(_question(cfg, vocab_size), sort_keys=True)
    return cache_folder() / f"compile-{hashlib.sha256(question.encode()).hexdigest()[:16]}.json"


def _remembered(cfg, vocab_size: int) -> dict | None:
    try:
        trial = json.loads((file := _file(cfg, vocab_size)).read_text())
        Compile(trial["chosen"])
        return trial | {"why": f"{trial['why']}, by the trial kept in {file}"}
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _keep(cfg, vocab_size: int, trial: dict) -> dict:
    """Of processes that try at the same time the first one's answer holds for all."""
    file = _file(cfg, vocab_size)
    aside = file.with_suffix(f".{machine()}-{os.getpid()}")
    with contextlib.suppress(OSError):  # nothing can be kept here
        write_json(aside, trial | {"question": _question(cfg, vocab_size)})
        try:
            os.link(aside, file)  # fails where there is one
        except FileExistsError:
            if kept := _remembered(cfg, vocab_size):
                return kept
            aside.replace(file)  # a damaged one
        except OSError:  # no links on this file system
            aside.replace(file)
        finally:
            aside.unlink(missing_ok=True)
    return trial


def _try(cfg, data: TokenData, batches: TrainBatches, say) -> dict:
    x, y = (torch.from_numpy(tokens) for tokens in batches(0))
    eager = _run(cfg, data, Compile.eager)
    eager_ms = _times([eager], x, y)[0]
    steps, seconds = cfg.train.steps, cfg.train.steps * eager_ms / 1e3
    trial = {"eager_ms": eager_ms, "full_ms": None, "compile_s": None, "chosen": Compile.eager}
    if seconds < SHORT:
        return trial | {"why": f"{steps:,} eager steps of {eager_ms:.1f} ms end in {seconds:.0f} s"}
    say(f"compile=auto: {steps:,} eager steps of {eager_ms:.1f} ms take {seconds / 60:.0f} min; trying torch.compile")
    try:
        began = time.perf_counter()
        full = _run(cfg, data, Compile.full)
        _times([full], x, y, steps=1)
        compile_s = time.perf_counter() - began
        eager_ms, full_ms = _times([eager, full], x, y)
    except Exception as e:  # without a C++ compiler, say; what it cannot compile says so in many ways
        what = f"{type(e).__name__}: {e}".splitlines()[0]
        return trial | {"failed": True, "why": f"torch.compile failed ({what})"}
    finally:
        torch.compiler.reset()
    trial |= {"eager_ms": eager_ms, "full_ms": full_ms, "compile_s": compile_s}
    if full_ms < (1 - GAIN) * eager_ms and (eager_ms - full_ms) * steps / 1e3 > compile_s:
        trial["chosen"] = Compile.full
    return trial | {
        "why": f"compiled in {compile_s:.0f} s, steps take {full_ms:.1f} ms, and {eager_ms:.1f} ms where eager"
    }


def _run(cfg, data: TokenData, choice: Compile) -> Run:
    cfg = replace(cfg)
    _settle(cfg, choice)
    return Run(cfg, data)


def _times(runs: list[Run], x: Tensor, y: Tensor, steps: int = STEPS) -> list[float]:
    """Median milliseconds of a step of each, interleaved, at a learning rate of 0."""
    ms, began = [[] for _ in runs], time.monotonic()
    for n in range(WARMUP + steps):
        if n > WARMUP and time.monotonic() - began > MOST_SECONDS:
            break
        for run, times in zip(runs, ms, strict=True):
            times.append(run.ms_by(time.perf_counter, n, x, y))
    return [statistics.median(times[WARMUP:]) for times in ms]
