"""Step times, and the share of the machine's peak that they reach."""

import sys
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


def process_peak_mib() -> float | None:
    """Largest resident memory of this process so far, everything included; None on Windows."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
