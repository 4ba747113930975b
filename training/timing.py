"""Step times, and the share of the machine's peak that they reach."""

import contextlib
import os
import time

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
