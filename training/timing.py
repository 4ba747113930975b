"""Step times, and the share of the machine's peak that they reach."""

import contextlib
import os
import sys
import time
from pathlib import Path

import torch

WARMUP_STEPS = 10
"""First steps of a process (compilation, allocator, caches), left out of every statistic."""

PEAK_BF16_FLOPS = {
    # dense bfloat16 with float32 accumulation, from NVIDIA's data sheets; keys as torch.cuda.get_device_name() says
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}


def core_waits(device: torch.device) -> dict[str, float]:
    """Seconds that each thread of this process has been ready to run but had no core, by Linux's schedstat.

    Empty on a GPU, which the threads only feed, and where Linux does not tell.
    """
    waits = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task") if device.type == "cpu" else []:
            with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{thread}/schedstat") as file:
                waits[thread] = int(file.read().split()[1]) / 1e9
    return waits


def now(device: torch.device) -> float:
    """Seconds, once the device has finished all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """FLOP/s that the device could do at best in this dtype, or None where no figure is known."""
    if device.type == "cuda" and dtype == "bfloat16":
        return PEAK_BF16_FLOPS.get(torch.cuda.get_device_name(device))
    return None


def forget_process_peak() -> None:
    """Lets `process_peak_mib` count from here, on Linux: a sweep's jobs share one process."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def process_peak_mib() -> float | None:
    """Largest resident memory of this process, everything included; None on Windows."""
    with contextlib.suppress(OSError):
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["VmHWM"].split()[0]) / 2**10
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # macOS counts bytes
