"""Where and how a model runs: device, dtype, kernels, compilation, determinism. Every `auto` is settled here, once,
but for compile=auto on a CPU, which training.trial settles."""

import os
import warnings
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from errors import UserError, near
from kernels.cpu import CannotBuild, library
from model.config import Kernels
from model.gpt import GPT
from training.config import Compile, Device, Dtype, Strategy
from training.distributed import strategy_of

AVAILABLE = {
    Device.cuda: torch.cuda.is_available,
    Device.mps: torch.backends.mps.is_available,
    Device.cpu: lambda: True,
}
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
CHOICES = ("device", "dtype", "compile", "kernels")


def settle(cfg) -> None:
    """Replaces each `auto` of a run's Config by its choice for this machine; UserError where one cannot be had.

    On a CPU compile=auto, and kernels=auto with it, wait for `training.trial`.
    """
    if cfg.device == Device.auto:
        cfg.device = next(device for device, available in AVAILABLE.items() if available())
    if not AVAILABLE[cfg.device]():
        here = [device for device, available in AVAILABLE.items() if available()]
        raise UserError(f"device={cfg.device} is not to be had on this machine; choose device={' or '.join(here)}")
    cuda = cfg.device == Device.cuda
    if cfg.dtype == Dtype.auto:
        cfg.dtype = Dtype.bfloat16 if cuda else Dtype.float32
    if cfg.dtype == Dtype.bfloat16 and cfg.device == Device.mps:
        raise UserError("dtype=bfloat16 is for CUDA, and for CPUs that have it; choose dtype=float32 on device=mps")
    strategy = strategy_of(cfg.dist)
    if cfg.compile == Compile.auto and (cfg.device != Device.cpu or strategy != Strategy.none):
        whole = Compile.block if strategy == Strategy.fsdp else Compile.full
        cfg.compile = whole if cuda else Compile.eager
    if cfg.dist.gather == Dtype.bfloat16 and cfg.dtype != Dtype.bfloat16:
        raise UserError(f"dist.gather=bfloat16 is for dtype=bfloat16, and this run is in {cfg.dtype}; leave it out")
    if cfg.compile == Compile.full and strategy == Strategy.fsdp:
        raise UserError(
            "compile=full takes all weights at once, and dist.strategy=fsdp gathers them block by block; choose "
            "compile=block"
        )
    if cfg.compile_mode not in COMPILE_MODES:
        raise UserError(f"there is no compile_mode={cfg.compile_mode}; {near(cfg.compile_mode, COMPILE_MODES)}")
    if cfg.compile_mode != "default" and not (cuda and cfg.compile != Compile.eager):
        raise UserError(f"compile_mode={cfg.compile_mode} is for device=cuda, compiled; leave it out")
    if cfg.compile_mode == "reduce-overhead" and strategy == Strategy.fsdp:
        raise UserError(
            "compile_mode=reduce-overhead replays addresses, and fsdp gathers weights to new ones; leave it out"
        )
    if cfg.kernels == Kernels.auto and cfg.compile != Compile.auto:
        cfg.kernels = fastest_kernels(cfg)
    elif cfg.kernels == Kernels.triton:
        check_triton(cfg.device)
    elif cfg.kernels == Kernels.cpu and (why := why_not_c(cfg)):
        raise UserError(f"kernels=cpu cannot be had: {why}; choose kernels=torch")


def fastest_kernels(cfg) -> Kernels:
    if cfg.device == Device.cuda:
        return Kernels.triton if find_spec("triton") else Kernels.torch
    return Kernels.torch if why_not_c(cfg) else Kernels.cpu


def why_not_c(cfg) -> str | None:
    """What keeps the C kernels from being used, in words."""
    if cfg.device != Device.cpu or cfg.dtype != Dtype.float32:
        return f"its C functions are for device=cpu and dtype=float32, not {cfg.device} and {cfg.dtype}"
    if cfg.compile in (Compile.block, Compile.full):
        return "torch.compile makes kernels of its own, and cannot see into these"
    try:
        library()
    except CannotBuild as e:
        return str(e)
    return None


def check_triton(device: Device) -> None:
    try:
        import triton
    except ImportError as e:
        raise UserError("kernels=triton needs Triton, which is not installed here; choose kernels=torch") from e
    if device != Device.cuda and not triton.knobs.runtime.interpret:
        raise UserError(
            f"kernels=triton needs a GPU, and this run is on device={device}; choose kernels=torch, or set "
            "TRITON_INTERPRET=1 to run the kernels, slowly, in Triton's interpreter"
        )


def compiled(model: GPT, device: torch.device, what: Compile, mode: str = "default") -> Callable[..., Tensor]:
    """`model` to be called for its loss: as it is, compiled block by block, or as one graph; for fixed shapes.

    Blocks share one graph, but for the first in pre placement, so that more of them take no longer to compile. On a CPU
    the calls of compiled loops are C++ too, for Python's are dear there.
    """
    how = {"options": {"cpp_wrapper": True}} if device.type == "cpu" else {"mode": mode}
    how |= {"fullgraph": True, "dynamic": False}
    if what == Compile.full:
        return torch.compile(model, **how)
    if what == Compile.block:
        # torch.compile itself asks a block's input, which is no leaf, for its gradient
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        for block in model.blocks:
            block.forward = torch.compile(block.forward, **how)  # what FSDP hooks on to a block stays outside
    return model


def make_deterministic(device: str, asked: bool = False) -> None:
    """Deterministic algorithms: always on a CPU, where `asked` on CUDA."""
    on = device == Device.cpu or asked
    if on and device == Device.cuda:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(on)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a pass over every new tensor; our tests have it
