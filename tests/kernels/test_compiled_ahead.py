"""The kernels compiled, unrun, for four GPUs: no spill, no float64, wide loads, no more registers than kept."""

import json

import pytest
import triton

from scripts.compile_ahead import COLUMNS, TARGETS
from scripts.results import read
from tests.conftest import ROOT
from tests.kernels.test_kernels import python

KEPT = ROOT / "results" / "kernels" / "compiled.json"
KEY = ("target", "kernel", "direction", "launch", "n_cols", "dtype")
# one row a tile, chunks, rows that are not aligned; LayerNorm with all that takes registers. For one target also
# RMSNorm and LayerNorm's other widths; the rest stands in KEPT, and is compiled by the command that it names.
CODE = """
import json
from scripts.compile_ahead import cases, resources
some = cases([4096, 65536, 1002], [("add_layer_norm", True), ("swiglu", False), ("rope", False)])
if {target!r} == "sm_90":
    some += cases([4096, 65536, 1002], [("rms_norm", False)]) + cases([256, 1024, 8192], [("add_layer_norm", True)])
print(json.dumps(list(resources({target!r}, some))))
"""


def assert_no_waste(rows):
    for row in rows:
        case = {key: row[key] for key in KEY}
        assert row["spilled_bytes"] == 0, f"{case} spills registers"
        assert row["float64"] == 0, f"{case} computes in float64"
        assert row["int32_products"] == 0, f"{case} multiplies offsets in int32"
        if row["n_cols"] % 16 == 0:
            assert row["loads_of_16_bytes"] >= max(1, row["tensors_read"]), f"{case} has narrow loads"
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
    assert len(compiled) >= 2 * 3 * 7
    assert_no_waste(compiled)
    version = json.loads(KEPT.read_text())["environment"]["versions"]["triton"]
    if version != triton.__version__:
        pytest.skip(f"{KEPT.name} was kept with Triton {version}, and this is {triton.__version__}")
    kept = {tuple(row[key] for key in KEY): row for row in read(KEPT)}
    for row in compiled:
        before = kept[tuple(row[key] for key in KEY)]
        for what in ("registers", "shared_bytes", "instructions"):
            assert row[what] <= before[what], f"{what} grew to {row[what]}: {before}"


def test_rope_compiles_for_strides_of_any_type():
    """Of q an int32, of k an int64 or a constant: both branches of the kernel must take them alike."""
    python("-c", """
import torch, kernels
from kernels import rotary
from scripts.compile_ahead import TARGETS, compile_for
rotary.launch = lambda kernel, programs, on, args, constants: compile_for(TARGETS["sm_90"], kernel, args, constants)
q = torch.empty(1, 2, 3, 8, device="meta")
for stride in (2**31, 1):
    k = torch.empty_strided((1, 1, 3, 8), (24, stride, 8, 1), device="meta")
    kernels.rope(q, k, *torch.empty(2, 3, 4, device="meta"))
    kernels.rope(k, q, *torch.empty(2, 3, 4, device="meta"))
""", TRITON_INTERPRET=None)  # fmt: skip


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
