"""Every command of the README runs, shrunk, and every figure in it stands in a committed result."""

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from compare.figures import draw
from scripts import (
    bench_dispatch,
    bench_growth,
    bench_loss,
    bench_prepare,
    bench_processes,
    bench_train,
    check_resume,
    check_stats,
    compile_ahead,
    plan,
)
from scripts.report import render
from scripts.results import read
from tests.conftest import ROOT
from tests.train.ranks import free_port

README = "\n".join(
    (ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/cluster.md", "docs/data.md")
)
ROW_TABLES = {
    "results/kernels/compiled.json": lambda rows: compile_ahead.render([r for r in rows if r["target"] == "sm_90"]),
    "results/kernels/dispatch.json": bench_dispatch.render,
    "results/compare/statistics.json": check_stats.render,
    "results/cpu/train_tiny.json": bench_train.render,
    "results/cpu/train_10m.json": bench_train.render,
    "results/cpu/loss.json": bench_loss.render,
    "results/cpu/growth.json": bench_growth.render,
    "results/cpu/processes.json": bench_processes.render,
    "results/cpu/prepare.json": bench_prepare.render,
    "results/resume/kills.json": check_resume.render,
    "results/plan/llama_7b.json": plan.render,
}
BLOCKS = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [line.partition("  #")[0].strip() for block in BLOCKS for line in block.splitlines() if line.strip()]

# one worker runs all of this file in its order: commands go on from the runs of the commands before
pytestmark = [pytest.mark.xdist_group("readme"), pytest.mark.seconds(30)]

# what makes any training command of the README take seconds
SHRUNK = [
    "model.n_layer=1", "model.n_head=1", "model.n_embd=16", "model.block_size=16", "train.steps=3",
    "device=cpu", "train.batch_size=2", "train.eval_tokens=256", "train.sample_chars=20", "wandb.mode=disabled",
    "compare.report=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Where the README's files are: a text to train on, and the runs of the commands before."""
    place = tmp_path_factory.mktemp("readme")
    (place / "input.txt").write_text("To be, or not to be, that is the question:\n" * 100)
    return place


def resolve(word: str, place: Path) -> str:
    """A word of a command with the README's paths replaced by those of the test."""
    if word.startswith(("run=runs/", "baseline=runs/", "init_from=runs/")):
        key, name = word.split("=runs/")
        found = min((place / "runs").glob(f"{name}*"))
        return f"{key}='{found}'" if key == "init_from" else f"{key}={found}"
    if word.startswith("runs/"):
        return str(min((place / "runs").glob(f"{word.removeprefix('runs/')}*")))
    if word.startswith("to="):
        return f"to={place / 'result.json'}"
    return word.replace("data.path=input.txt", f"data.path={place / 'input.txt'}")


@pytest.mark.parametrize("command", [c for c in COMMANDS if not c.startswith(("source", "make"))])
def test_command(command, place, train_py):
    """Those of train.py but for the first run in this process: in one of their own they differ by nothing but time."""
    program, *words = (resolve(word, place) for word in shlex.split(command))
    assert program in ("python", "torchrun")
    if "train.py" in words:
        words += [*SHRUNK, f"runs_dir={place}/runs", f"data.cache_dir={place}/tokens"]
    if program == "torchrun":
        words = ["-m", "torch.distributed.run", f"--master_port={free_port()}", *words]
    if words[0] == "train.py" and command != "python train.py":
        done = train_py(*words[1:])
    else:
        environment = dict(os.environ)
        if "scripts.compile_ahead" in words:
            words += ["n_cols=256", "target=gfx942"]
            del environment["TRITON_INTERPRET"]  # under which nothing is compiled
        if "data=text" in words:
            words += [f"data.cache_dir={place}/tokens"]
        if "scripts.bench_train" in words:
            words += ["block=8", "batch=1", "norm=rmsnorm", "kernels=torch", "compile=eager"]
        run = [sys.executable, *words]
        done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_sweep_on_a_cluster_is_one_that_hydra_can_compose(train_py):
    (block,) = [b for b in re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL) if "submitit_slurm" in b]
    words = [word for word in shlex.split(block.replace("\\\n", "")) if word.startswith("hydra")]
    done = train_py(*words, "--cfg", "hydra")
    assert done.returncode == 0, done.stderr
    assert "max_num_timeout: 20" in done.stdout


def test_make_train_runs_what_the_readme_says(place, train_py):
    assert "make train" in COMMANDS
    assert "make test" in COMMANDS
    make = ["make", "-n", "-B", "train"]
    printed = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (recipe,) = [line for line in printed.splitlines() if "train.py" in line]
    python, script, *words = shlex.split(recipe)
    assert [python, script] == [".venv/bin/python", "train.py"]
    assert words == ["norm=rmsnorm", "against=layernorm", "name=quickstart", "overwrite=true"]
    args = [*words, *SHRUNK, f"runs_dir={place}/make", f"data.cache_dir={place}/tokens"]
    for _ in range(2):  # it overwrites its own
        done = train_py(*args)
        assert done.returncode == 0, done.stderr
    assert {f.name for f in (place / "make").glob("[!.]*")} == {"quickstart", "quickstart-layernorm"}


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(results/\S+\.json)`", README)) - set(ROW_TABLES)))
def test_figures_come_from_a_committed_result(name):
    result = json.loads((ROOT / name).read_text())
    assert result["command"] in README
    for line in render(result).splitlines():
        assert line in README


@pytest.mark.parametrize(("name", "shown"), ROW_TABLES.items())
def test_figures_of_tables_come_from_a_committed_result(name, shown):
    """Each line of the table before a result's name is one that its script would print."""
    assert json.loads((ROOT / name).read_text())["command"] in README
    (block,) = re.findall(r"```text\n([^`]*)```\n\n`" + re.escape(name), README)
    quoted, printed = (
        [" ".join(line.split()) for line in text.splitlines() if "---" not in line]
        for text in (block, shown(read(ROOT / name)))
    )
    assert len(quoted) >= 4  # its head and three rows
    assert set(quoted) <= set(printed)


def test_every_committed_result_is_quoted():
    committed = {str(f.relative_to(ROOT)) for f in (ROOT / "results").rglob("*.json")}
    assert committed
    assert committed == set(re.findall(r"`(results/\S+\.json)`", README))


PINNED = re.search(r"^matplotlib==(.*)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)[1]


@pytest.mark.skipif(version("matplotlib") != PINNED, reason="another matplotlib draws other bytes")
def test_every_picture_is_drawn_from_the_result_beside_it(tmp_path):
    pictures = sorted((ROOT / "results").rglob("*.png"))
    assert pictures
    for picture in pictures:
        assert f"({picture.relative_to(ROOT)})" in README
        result = picture.with_suffix(".json")
        if picture.name.startswith("train"):
            bench_train.draw(read(result), tmp_path / "again.png")
        else:
            draw(json.loads(result.read_text()), tmp_path / "again.png")
        assert (tmp_path / "again.png").read_bytes() == picture.read_bytes()


def test_every_folder_and_file_named_exists():
    for name in re.findall(r"`((?:[\w.]+/)+[\w.]*|\w+\.py)`", README):
        if not name.startswith(("runs/", ".cache/")):
            assert (ROOT / name).exists(), name


def test_environment_of_a_result_names_machine_and_commit():
    for f in (ROOT / "results").rglob("*.json"):
        environment = json.loads(f.read_text())["environment"]
        assert environment["git_commit"]
        assert environment["git_dirty"] is False
        assert environment["versions"]["torch"]
        assert os.sep not in environment["device"]
