"""All that one machine with a GPU can tell: whether the kernels are right, what a call costs, how fast they are.

python -m scripts.gpu            writes results/gpu/DEVICE/; within 8 minutes, and `make gpu` is the same
"""

import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from errors import UserError
from scripts import bench_dispatch, bench_kernels, check_kernels
from scripts.options import run_script


@dataclass
class Options:
    pass


def folder() -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    return Path("results/gpu") / name


def main(options: Options) -> None:
    if not torch.cuda.is_available():
        raise UserError("there is no GPU here; python -m scripts.compile_ahead says what can be said without one")
    to = folder()
    print("1. Against the plain twins", flush=True)
    check_kernels.main(check_kernels.Options(to=str(to / "check.json")))
    print("\n2. Dispatch", flush=True)
    bench_dispatch.main(bench_dispatch.Options(to=str(to / "dispatch.json")))
    print("\n3. Speed", flush=True)
    bench_kernels.main(bench_kernels.Options(to=str(to / "kernels.json"), seconds=240))
    if find_spec("scripts.bench_train"):
        print("\n4. Training", flush=True)
        subprocess.run([sys.executable, "-m", "scripts.bench_train", f"to={to / 'train.json'}"], check=True)


if __name__ == "__main__":
    run_script(main, Options, __doc__)
