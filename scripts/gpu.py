"""All that one machine with a GPU can tell: whether the kernels are right, what a call costs, how fast they are.

python -m scripts.gpu            writes results/gpu/DEVICE/; within 8 minutes, and `make gpu` is the same
"""

import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from errors import UserError
from scripts import bench_dispatch, bench_kernels, check_kernels
from scripts.options import run_script

SECONDS, TRAINING, RESERVE = 480, 240, 60  # for all, for whole steps, and for what is started before the time is over


@dataclass
class Options:
    pass


def folder() -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    return Path("results/gpu") / name


def main(options: Options) -> None:
    if not torch.cuda.is_available():
        raise UserError("there is no GPU here; python -m scripts.compile_ahead says what can be said without one")
    to, start = folder(), time.monotonic()
    print("1. Against the plain twins", flush=True)
    wrong = check_kernels.run(str(to / "check.json"))
    print("\n2. Dispatch", flush=True)
    bench_dispatch.main(bench_dispatch.Options(to=str(to / "dispatch.json")))
    print("\n3. Speed", flush=True)
    seconds = max(60, int(start + SECONDS - TRAINING - RESERVE - time.monotonic()))
    bench_kernels.main(bench_kernels.Options(to=str(to / "kernels.json"), seconds=seconds))
    print("\n4. Training", flush=True)
    which = ["norm=layernorm,rmsnorm", "kernels=torch,triton", "compile=eager,full", "peers=transformers"]
    command = [sys.executable, "-m", "scripts.bench_train", f"to={to / 'train.json'}", *which]
    try:
        failed = subprocess.call(command, timeout=TRAINING + RESERVE)
    except subprocess.TimeoutExpired:
        failed = True
        print(f"whole steps took more than {TRAINING + RESERVE} s: {' '.join(command[1:])} has all the time it needs")
    if wrong:
        print(f"\n{wrong} comparisons with the twins fail; no figure above is worth anything until they hold")
    sys.exit(1 if wrong or failed else 0)


if __name__ == "__main__":
    run_script(main, Options, __doc__)
