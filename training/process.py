"""Steadies what the C library and OpenMP do in this process, whose step times are to be compared.

Import it before torch, which loads OpenMP. On systems other than Linux times stay as steady as they are.
"""

import contextlib
import ctypes
import os
import sys
from pathlib import Path

SPINS = 10_000  # of GNU's OpenMP, some 0.5 ms; its own 300,000 are some 15 ms

if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    # A thread that waits for the others spins, and keeps the core from them where another process has one of the cores:
    # for milliseconds at each of some hundred operations of a step.
    os.environ["GOMP_SPINCOUNT"] = str(SPINS)

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # mallopt(3)


def _libc(name: str, *args: int) -> None:
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library, or another system
        getattr(ctypes.CDLL(None), name)(*args)


def keep_freed_memory() -> None:
    """Keeps freed memory in the process for its next step, instead of giving it back to the kernel.

    How much glibc gives back depends on what the process allocated before; the next step gets it again in pages of
    zeros, by page faults in the thousands, which cost more the norm that allocates more.
    """
    _libc("mallopt", M_MMAP_MAX, 0)
    _libc("mallopt", M_TRIM_THRESHOLD, -1)


def forget_process_peak() -> None:
    """Lets `process_peak_mib` count from here, without what a sweep's earlier job freed; on Linux."""
    _libc("malloc_trim", 0)
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
