"""Options of the scripts: typed, and refused with what would mend them."""

import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum

import pytest

from errors import UserError
from scripts.options import parse
from tests.conftest import ROOT


class Colour(StrEnum):
    red = "red"
    blue = "blue"


@dataclass
class Options:
    run: str
    n: int = 3
    to: str | None = None
    colour: Colour = Colour.red


def test_values_have_their_types():
    assert parse(Options, ["run=a=b", "n=5", "colour=blue"]) == Options("a=b", 5, None, Colour.blue)
    assert parse(Options, ["run=", "to=null"]) == Options("")
    assert parse(Options, ["run=x", "to=y"]).to == "y"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "run= must be given"),
        (["run"], "cannot read 'run'; options are written key=value: run, n, to, colour"),
        (["rum=x"], "there is no option 'rum'; near names: run"),
        (["run=x", "n=many"], "n=many must be an integer"),
        (["run=x", "colour=green"], "colour=green must be one of red, blue"),
    ],
)
def test_mistakes(args, message):
    with pytest.raises(UserError, match=message):
        parse(Options, args)


SCRIPTS = ("bench_dispatch", "bench_kernels", "check_kernels", "compile_ahead", "gpu")


def test_kernel_scripts_need_pytorch_and_triton_alone():
    """They run on machines with a GPU and little else."""
    code = f"""
import importlib, sys
for script in {SCRIPTS}:
    module = importlib.import_module(f"scripts.{{script}}")
    assert f"python -m scripts.{{script}}" in module.__doc__
top = {{name.partition(".")[0] for name in sys.modules}}
print(sorted(top & {{"hydra", "omegaconf", "tiktoken", "datasets", "wandb", "rich", "scipy", "matplotlib", "yaml"}}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help():
    done = subprocess.run(
        [sys.executable, "-m", "scripts.compare", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "python -m scripts.compare" in done.stdout
