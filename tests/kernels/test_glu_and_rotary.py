"""What only SwiGLU and RoPE promise."""

import pytest
import torch

import kernels
from kernels import reference, rotary
from tests.kernels.test_kernels import close, python
from tests.kernels.twins import DTYPES, INPUTS, assert_as_good_as_twin, draw, rope_table, run

pytestmark = pytest.mark.usefixtures("bfloat16_rounds_to_nearest")


def test_swiglu_of_two_halves_of_one_matrix():
    packed, results = draw(2, 3, 34), []
    for home in (kernels, reference):
        leaf = packed.clone().requires_grad_()
        y = home.swiglu(*leaf.chunk(2, dim=-1))
        results.append({"y": y.detach(), "dx": torch.autograd.grad(y, leaf, draw(*y.shape, seed=3))[0]})
    close(*results)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # NumPy's; a GPU just gets infinity
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_of_large_gates(dtype):
    gate = torch.tensor([-1e4, -800.0, -90.0, -20.0, 0.0, 20.0, 90.0, 800.0, 1e4]).to(dtype)
    inputs = {"gate": gate, "up": torch.ones_like(gate)}
    ours, theirs = run(kernels, "swiglu", inputs), run(reference, "swiglu", inputs)
    assert all(t.isfinite().all() for t in ours.values())
    close(ours, theirs, tolerance=2 * torch.finfo(dtype).eps)


def test_swiglu_of_mixed_dtypes():
    inputs = INPUTS["swiglu"]("swiglu", 3, 40, dtype=torch.float32)
    assert_as_good_as_twin("swiglu", inputs | {"gate": inputs["gate"].bfloat16()})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotated", [10, 8, 2])
def test_rope_turns_the_first_channels(rotated, dtype):
    inputs = INPUTS["rope"]("rope", 2, 5, 10, dtype=dtype)
    assert_as_good_as_twin("rope", inputs, rotated=rotated)
    results = run(kernels, "rope", inputs, rotated=rotated)
    for i, key in enumerate(("q", "k")):
        assert torch.equal(results[f"output {i}"][..., rotated:], inputs[key][..., rotated:])


@pytest.mark.parametrize(("q_heads", "k_heads"), [(1, 1), (8, 8), (9, 3), (20, 1), (3, 17)])
def test_rope_of_grouped_heads(q_heads, k_heads):
    """More heads than one program turns, and not a multiple of them."""
    inputs = {"q": draw(2, q_heads, 3, 8), "k": draw(2, k_heads, 3, 8, seed=1)}
    close(run(kernels, "rope", inputs), run(reference, "rope", inputs))


def test_rope_of_many_positions():
    inputs = INPUTS["rope"]("rope", 300, 8, dtype=torch.bfloat16)
    assert_as_good_as_twin("rope", inputs)


def test_rope_takes_a_slice_of_a_longer_table():
    inputs = INPUTS["rope"]("rope", 5, 8)
    cos, sin = (t.repeat_interleave(2, 1)[:, ::2][:5] for t in rope_table(9, 8))
    ours, theirs = (home.rope(**inputs, cos=cos, sin=sin) for home in (kernels, reference))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("wanted", ["q", "k"])
def test_rope_turns_only_what_needs_a_gradient(wanted, monkeypatch):
    turned = []
    monkeypatch.setattr(rotary, "launch", lambda kernel, programs, on, args, _: turned.append(args[7:9]))
    q, k = (t.requires_grad_(name == wanted) for name, t in INPUTS["rope"]("rope", 5, 8).items())
    outputs = kernels.rope(q, k, *rope_table(5, 8))
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    assert turned == [(3, 1), (3, 0) if wanted == "q" else (0, 1)]


def test_operators_keep_their_promises():
    gate, up, dy = (draw(3, 8, seed=seed) for seed in range(3))
    torch.library.opcheck(torch.ops.normgpt.swiglu_forward.default, (gate, up))
    for needs in ([True, True], [True, False], [False, True]):
        torch.library.opcheck(torch.ops.normgpt.swiglu_backward.default, (dy, gate, up, needs))
    q, k, (cos, sin) = draw(2, 4, 3, 8), draw(2, 2, 3, 8), rope_table(3, 8)
    for pair in ((q, k), (q, None), (None, k)):
        torch.library.opcheck(torch.ops.normgpt.rope.default, (*pair, cos, sin, True))


ONES = torch.ones(2, 3, 4, 6)
TABLE = torch.ones(4, 3)


@pytest.mark.parametrize(("name", "arguments", "error", "message"), [
    ("swiglu", (ONES, ONES[..., :5]), ValueError, r"must have one shape, .*\(2, 3, 4, 6\) and \(2, 3, 4, 5\)"),
    ("swiglu", (ONES[..., :0], ONES[..., :0]), ValueError, "1 to 1073741824 wide"),
    ("swiglu", (ONES.long(), ONES), TypeError, "gate must be float16, .* got torch.int64"),
    ("swiglu", (ONES, ONES.to("meta")), ValueError, "up is on meta and gate on cpu"),
    ("rope", (ONES, ONES.long(), TABLE, TABLE), TypeError, "k must be float16, .* got torch.int64"),
    ("rope", (ONES, ONES.double(), TABLE, TABLE), TypeError, "q and k must have one dtype"),
    ("rope", (ONES, ONES[:1], TABLE, TABLE), ValueError, "must agree but for their heads"),
    ("rope", (ONES[0], ONES[0], TABLE, TABLE), ValueError, "must agree but for their heads"),
    ("rope", (ONES, ONES, TABLE[:3], TABLE[:3]), ValueError, r"shape \(4, R/2\) with R from 2 to 6, got \(3, 3\)"),
    ("rope", (ONES, ONES, torch.ones(4, 4), torch.ones(4, 4)), ValueError, "with R from 2 to 6"),
    ("rope", (ONES, ONES, TABLE[:, :0], TABLE[:, :0]), ValueError, "with R from 2 to 6"),
    ("rope", (ONES, ONES, TABLE, TABLE[:, :2]), ValueError, r"got \(4, 3\) and \(4, 2\)"),
    ("rope", (ONES, ONES, TABLE.to("meta"), TABLE), ValueError, "cos is on meta and q on cpu"),
    ("rope", (ONES, ONES, TABLE.clone().requires_grad_(), TABLE), ValueError, "cos and sin get no gradient"),
])  # fmt: skip
def test_bad_input(name, arguments, error, message):
    with pytest.raises(error, match=message) as raised:
        getattr(kernels, name)(*arguments)
    assert "kernels=torch" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_offsets_beyond_int32():
    """Rows, heads and batches so far apart that int32 would wrap: in a process of its own, see test_norm."""
    python("-c", """
import torch
from kernels import rope, swiglu
memory = torch.empty(2**31 + 4096, dtype=torch.bfloat16)  # virtual: only the touched pages become resident
gate = memory.as_strided((3, 8), (2**30, 1))
gate.copy_(torch.randn(3, 8))
assert torch.equal(swiglu(gate, gate), swiglu(gate.clone(), gate.clone()))
cos, sin = torch.randn(3, 4), torch.randn(3, 4)
for strides in ((8, 8, 2**30, 1), (2**30, 8, 8, 1), (8, 2**30, 8, 1)):
    shape = tuple(3 if s in (2**30, 1) or i == 2 else 1 for i, s in enumerate(strides))[:3] + (8,)
    q = memory.as_strided(shape, strides)
    q.copy_(torch.randn(shape))
    for a, b in zip(rope(q, q, cos, sin), rope(q.clone(), q.clone(), cos, sin)):
        assert torch.equal(a, b)
""")  # fmt: skip
