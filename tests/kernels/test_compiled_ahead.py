"""The kernels compiled, unrun, for four GPUs: no spill, no float64, wide loads, no more registers than kept."""

import json

import pytest
import triton

from scripts.compile_ahead import COLUMNS, TARGETS
from scripts.kernel_cases import read
from tests.conftest import ROOT
from tests.kernels.test_kernels import python

KEPT = ROOT / "results" / "kernels" / "compiled.json"
KEY = ("target", "kernel", "direction", "launch", "n_cols", "dtype")
# narrow rows, one row a tile, chunks; RMSNorm, and LayerNorm with all that takes registers
CODE = """
import json
from scripts.compile_ahead import cases, resources
kernels = [("rms_norm", False), ("add_layer_norm", True), ("swiglu", False), ("rope", False)]
print(json.dumps(list(resources({target!r}, cases((256, 4096, 65536), kernels)))))
"""


def assert_no_waste(rows):
    for row in rows:
        case = {key: row[key] for key in KEY}
        assert row["spilled_bytes"] == 0, f"{case} spills registers"
        assert row["float64"] == 0, f"{case} computes in float64"
        assert row["loads_of_16_bytes"] >= 1, f"{case} has no load of 16 bytes"
        if row["target"].startswith("sm_"):
            assert row["fused_multiply_adds"] == 0, f"{case} contracts to FMA"
        if row["launch"].startswith(("forward", "backward")):
            expected = 0 if row["kernel"] == "swiglu" else 1 if row["kernel"].endswith("rms_norm") else 2
            assert row["reductions_per_row"] == expected, case


@pytest.fixture(scope="module", params=TARGETS)
def compiled(request):
    """In a process of its own, for under TRITON_INTERPRET nothing can be compiled."""
    return json.loads(python("-c", CODE.format(target=request.param), TRITON_INTERPRET=None))


def test_every_kept_size_is_without_waste():
    kept = read(KEPT)
    assert {row["target"] for row in kept} == set(TARGETS)
    assert {row["n_cols"] for row in kept} == set(COLUMNS)
    assert {row["kernel"].removesuffix(" with bias") for row in kept} >= {"rms_norm", "layer_norm", "swiglu", "rope"}
    assert_no_waste(kept)


@pytest.mark.seconds(20)
def test_compiles_without_waste_and_takes_no_more_than_kept(compiled):
    assert len(compiled) > 30
    assert_no_waste(compiled)
    version = json.loads(KEPT.read_text())["environment"]["versions"]["triton"]
    if version != triton.__version__:
        pytest.skip(f"{KEPT.name} was kept with Triton {version}, and this is {triton.__version__}")
    kept = {tuple(row[key] for key in KEY): row for row in read(KEPT)}
    for row in compiled:
        before = kept[tuple(row[key] for key in KEY)]
        for what in ("registers", "shared_bytes", "instructions"):
            assert row[what] <= before[what], f"{what} grew to {row[what]}: {before}"


def test_cpu_outside_the_interpreter_is_refused():
    out = python("-c", """
import torch, kernels
for call in (lambda: kernels.rms_norm(torch.ones(2, 4)), lambda: kernels.swiglu(torch.ones(2, 4), torch.ones(2, 4))):
    try:
        call()
    except ValueError as error:
        print(error)
""", TRITON_INTERPRET=None)  # fmt: skip
    assert out.count("set TRITON_INTERPRET=1") == out.count("kernels=torch") == 2
