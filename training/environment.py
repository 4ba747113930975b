"""What a run ran on: enough to tell whether two runs' times, or bits, may be compared."""

import hashlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "triton", "numpy", "tiktoken", "datasets", "wandb", "hydra-core", "safetensors")
OPENMP = ("OMP_", "GOMP_", "KMP_")  # variables that say how many threads there are, and how they wait


def _git(*args: str) -> str | None:
    try:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _versions() -> dict[str, str | None]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def device_name(device: "torch.device") -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def utc_now() -> str:
    """Seconds are enough to tell whether two runs ran beside each other."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def machine() -> str:
    """The same for the same host, without its name."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:12]


def command() -> str:
    """What was typed: python train.py ..., or python -m scripts.NAME ..., or torchrun with either."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["-m", spec.name] if spec and spec.name.startswith("scripts.") else [Path(sys.argv[0]).name]
    launcher = ["python"]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        machines = os.environ["GROUP_WORLD_SIZE"]
        launcher = ["torchrun", *([f"--nnodes={machines}"] if machines != "1" else [])]
        launcher.append(f"--nproc_per_node={os.environ['LOCAL_WORLD_SIZE']}")
    return shlex.join([*launcher, *program, *sys.argv[1:]])


def describe(device: "torch.device") -> dict:
    """Versions, device, threads, commit and command, as plain values."""
    import torch

    status = _git("status", "--porcelain", "--", ".", ":(exclude)results")  # one result does not spoil the next
    return {
        "versions": _versions(),
        "device": device_name(device),
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "openmp": {key: value for key, value in sorted(os.environ.items()) if key.startswith(OPENMP)},
        "platform": platform.platform(),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": None if status is None else bool(status),
        "command": command(),
        "started": utc_now(),
    }
