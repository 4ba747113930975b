"""The import arrows of the packages, and what starting up must not load."""

import ast
import subprocess
import sys

import pytest

from tests.conftest import ROOT

ARROWS = {
    "errors": set(),
    "files": set(),
    "kernels": set(),
    "data": {"errors", "files"},
    "records": {"errors"},
    "compare": {"errors", "files", "records"},
    "model": {"kernels", "errors"},
    "training": {"model", "data", "compare", "kernels", "errors", "files", "records"},
    "configs": {"model", "data", "training", "errors", "files", "records"},
}
OURS = {*ARROWS, "train", "scripts", "tests"}


def imported(path) -> set[str]:
    """Modules that a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    return names


@pytest.mark.parametrize("package", ARROWS)
def test_arrows(package):
    alone = ROOT / f"{package}.py"
    files = [alone] if alone.exists() else sorted((ROOT / package).glob("*.py"))
    assert files
    for path in files:
        others = {name.split(".")[0] for name in imported(path)} & OURS - {package}
        assert others <= ARROWS[package], f"{path.name} imports {others - ARROWS[package]}"


def test_configs_import_only_the_config_dataclasses():
    for path in (ROOT / "configs").glob("*.py"):
        ours = {n for n in imported(path) if n.split(".")[0] in {"model", "data", "training"}}
        assert all(name.endswith(".config") for name in ours), f"{path.name} imports {ours}"


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_train_imports_nothing_heavy():
    assert not loaded_by("import train") & {
        "wandb",
        "datasets",
        "transformers",
        "matplotlib",
        "scipy",
        "triton",
        "pandas",
    }


def test_train_imports_little_beside_torch():
    """Hydra and rich are most of it; a heavy package brings hundreds."""
    assert len(loaded_by("import train") - loaded_by("import torch")) < 310


@pytest.mark.parametrize(
    "module", ["configs.cli", "compare.report", "scripts.compare", "scripts.report", "data.loader", "kernels"]
)
def test_these_need_no_torch(module):
    assert "torch" not in loaded_by(f"import {module}")
