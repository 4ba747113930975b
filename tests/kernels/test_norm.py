"""What only the norms promise: modes of the gain, the sum beside the norm, extreme rows, errors."""

import pytest
import torch

import kernels
from kernels import cpu, norm, reference
from tests.kernels.test_kernels import close, each_norm, python
from tests.kernels.twins import (
    DTYPES,
    INPUTS,
    NORMS,
    assert_as_good_as_twin,
    call,
    draw,
    run,
)

pytestmark = pytest.mark.usefixtures("bfloat16_rounds_to_nearest")

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
# the C kernels take float32 alone
each_home = pytest.mark.parametrize(
    ("home", "dtype"), [(kernels, torch.float64), (cpu, torch.float32)], ids=["triton", "c"]
)
each_add = pytest.mark.parametrize("name", [name for name in NORMS if name.startswith("add_")])


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("n_cols", [37, 2100])
@pytest.mark.parametrize("absent", [(), ("weight",), ("bias",), ("weight", "bias")])
@each_norm
def test_each_parameter_may_be_absent(name, absent, n_cols, zero_centered):
    inputs = {k: t for k, t in INPUTS[name](name, 5, n_cols).items() if k not in absent}
    ours, theirs = (run(home, name, inputs, zero_centered=zero_centered) for home in (kernels, reference))
    close(ours, theirs)


@each_norm
def test_one_is_added_to_the_gain_in_float32(name):
    """1 + 0.001 is 1 in bfloat16."""
    inputs = INPUTS[name](name, 5, 64, dtype=torch.bfloat16)
    inputs["weight"] = torch.full((64,), 1e-3, dtype=torch.bfloat16)
    assert_as_good_as_twin(name, inputs, zero_centered=True)


@each_add
@pytest.mark.parametrize("n_cols", [48, 8300])
@pytest.mark.parametrize("dtypes", [
    (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16),
    (torch.float32, torch.float64),
], ids=str)  # fmt: skip
def test_residual_of_another_dtype(name, dtypes, n_cols):
    """As under autocast: a branch in bfloat16 enters a stream of float32."""
    inputs = INPUTS[name](name, 3, n_cols, dtype=torch.float32)
    inputs = inputs | {key: inputs[key].to(dtype) for key, dtype in zip(("x", "residual"), dtypes, strict=True)}
    assert_as_good_as_twin(name, inputs, slack=8 if torch.float64 in dtypes else 1)


@each_add
@pytest.mark.parametrize("n_cols", [48, 8300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("home", [kernels, cpu], ids=["triton", "c"])
def test_fused_add_equals_add_then_norm_bit_for_bit(home, name, dtype, n_cols):
    inputs = INPUTS[name](name, 3, n_cols, dtype=dtype)
    y, h = call(home, name, inputs)
    alone = {k: t for k, t in inputs.items() if k != "residual"} | {"x": inputs["x"] + inputs["residual"]}
    assert torch.equal(h, alone["x"])
    assert torch.equal(y, *call(home, name.removeprefix("add_"), alone))


@each_add
@pytest.mark.parametrize("used", [0, 1])
@each_home
def test_either_output_may_go_unused(home, dtype, name, used):
    inputs, results = INPUTS[name](name, 4, 6, dtype=dtype), []
    for functions in (home, reference):
        leaves = {k: t.clone().requires_grad_() for k, t in inputs.items()}
        y = call(functions, name, leaves)[used]
        gradients = torch.autograd.grad(y, list(leaves.values()), draw(4, 6, seed=3, dtype=dtype), allow_unused=True)
        results.append({str(i): g for i, g in enumerate(gradients) if g is not None})
    close(*results, TOLERANCE[dtype])


@each_add
@each_home
def test_one_gradient_for_both_does_not_tie_the_leaves(home, dtype, name):
    """x and the residual share one gradient tensor on its way; adding to one .grad must leave the other alone."""
    leaves = {k: t.requires_grad_() for k, t in INPUTS[name](name, 4, 6, dtype=dtype).items()}
    sum(y.sum() for y in call(home, name, leaves)).backward()
    before = leaves["residual"].grad.clone()
    leaves["x"].grad.add_(1)
    assert torch.equal(leaves["residual"].grad, before)


@each_norm
@pytest.mark.parametrize(("home", "dtype", "n_cols"), [
    *((kernels, dtype, 64) for dtype in DTYPES[:3]), (kernels, torch.float16, 8300), (cpu, torch.float32, 64),
], ids=lambda value: getattr(value, "__name__", str(value)))  # fmt: skip
def test_extreme_rows_stay_finite(home, name, dtype, n_cols):
    inputs = {k: t for k, t in INPUTS[name](name, 5, n_cols, dtype=dtype).items() if k != "residual"}
    x = inputs["x"] * torch.tensor([[0.0], [1e4], [1e-4], [1.0], [1.0]], dtype=dtype)
    x[3] = 3.0
    inputs["x"] = x
    if name.startswith("add_"):
        inputs["residual"] = torch.zeros_like(x)
    results = run(home, name, inputs)
    assert all(t.isfinite().all() for t in results.values())
    y = results["output 0"]
    if name.endswith("layer_norm"):
        assert torch.equal(y[[0, 3]], inputs["bias"].expand(2, -1))
    else:
        assert torch.equal(y[0], torch.zeros_like(y[0]))


def test_what_each_norm_is_blind_to():
    """LayerNorm does not see x + c nor a · x; RMSNorm does not see a · x, and does see x + c."""
    x = draw(4, 33)
    layer, rms = (lambda x: kernels.layer_norm(x, eps=1e-30)), (lambda x: kernels.rms_norm(x, eps=1e-30))
    torch.testing.assert_close(layer(x + 5), layer(x))
    torch.testing.assert_close(layer(7 * x), layer(x))
    torch.testing.assert_close(rms(7 * x), rms(x))
    assert (rms(x + 5) - rms(x)).abs().max() > 0.1
    torch.testing.assert_close(rms(x - x.mean(-1, keepdim=True)), layer(x))


@each_norm
@each_home
def test_two_norms_in_sequence(home, dtype, name):
    """The inner one's output is the outer one's input, and nobody writes over either."""
    inputs, results = INPUTS[name](name, 4, 6, dtype=dtype), []
    for functions in (home, reference):
        leaves = {k: t.clone().requires_grad_() for k, t in inputs.items()}
        y, *_ = call(functions, name, leaves)
        z, *_ = call(functions, name, leaves | {"x": y})
        gradients = torch.autograd.grad(z + y, list(leaves.values()), draw(4, 6, seed=3, dtype=dtype))
        results.append({str(i): t for i, t in enumerate((z.detach(), *gradients))})
    close(*results, TOLERANCE[dtype])


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_operators_keep_their_promises(center, add):
    x, residual, weight, bias = draw(3, 8), draw(3, 8, seed=4) if add else None, draw(8, seed=1), draw(8, seed=2)
    forward = (x, residual, weight, bias if center else None, 1e-5, center, False)
    torch.library.opcheck(torch.ops.normgpt.norm_forward.default, forward)
    _, h, stats = norm._forward(*forward)
    double = torch.float64
    for dtypes in (
        (double, None, double, double if center else None),
        (double, torch.float32, None, None),
        (None, None, double, None),
    ):
        backward = (draw(3, 8, seed=3), draw(3, 8, seed=5) if add else None, h if add else x, weight, stats)
        torch.library.opcheck(torch.ops.normgpt.norm_backward.default, (*backward, center, False, *dtypes))


ONES, INTEGERS = torch.ones(2, 4), torch.ones(2, 4, dtype=torch.int64)
BAD = [
    ({"x": INTEGERS}, TypeError, "x must be float16, bfloat16, float32 or float64, got torch.int64"),
    ({"x": ONES.to(torch.float8_e4m3fn)}, TypeError, "x must be .* got torch.float8_e4m3fn"),
    ({"weight": INTEGERS[0]}, TypeError, "weight must be float16, .* got torch.int64"),
    ({"weight": torch.ones(3)}, ValueError, r"weight must have shape \(4,\).* got \(3,\)"),
    ({"weight": torch.ones(1, 4)}, ValueError, r"weight must have shape \(4,\).* got \(1, 4\)"),
    ({"weight": ONES[0].to("meta")}, ValueError, "weight is on meta and x on cpu"),
    ({"bias": torch.ones(5)}, ValueError, r"bias must have shape \(4,\).* got \(5,\)"),
    ({"residual": torch.ones(1, 4)}, ValueError, r"residual is \(1, 4\) and x \(2, 4\)"),
    ({"residual": ONES.to("meta")}, ValueError, "residual is on meta and x on cpu"),
    ({"x": torch.ones(())}, ValueError, "the last dimension of x must be 1 to 1073741824"),
    ({"x": torch.ones(2, 0)}, ValueError, r"1 to 1073741824, got shape \(2, 0\)"),
    ({"x": torch.ones(1).expand(1, 2**30 + 1)}, ValueError, r"got shape \(1, 1073741825\)"),
]


@pytest.mark.parametrize(
    ("name", "arguments", "error", "message"),
    [(name, *bad) for name in NORMS for bad in BAD if set(bad[0]) <= set(INPUTS[name](name, 2, 4))],
)
def test_bad_input(name, arguments, error, message):
    inputs = {"x": ONES} | ({"residual": arguments.get("x", ONES)} if name.startswith("add_") else {})
    with pytest.raises(error, match=message) as raised:
        getattr(kernels, name)(**inputs | arguments)
    assert "kernels=torch" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_offsets_beyond_int32():
    """Three rows 2³⁰ elements apart, in a process of its own because a wrapped offset ends in a segmentation fault.

    Offsets into what is written are not so easily made large: test_compiled_ahead looks for products of int32.

    The stride itself must fit int32: one that does not would arrive as int64 and widen the product.
    """
    python("-c", """
import torch
from kernels import add_layer_norm, layer_norm
memory = torch.empty(2**31 + 20000, dtype=torch.bfloat16)  # virtual: only the touched pages become resident
for n_cols, norm in ((8, layer_norm), (8, lambda x: add_layer_norm(x, x)[0]), (9000, layer_norm)):
    x, dy = (memory.as_strided((3, n_cols), (2**30, 1), offset) for offset in (0, 10000))
    x.copy_(torch.randn(3, n_cols)), dy.copy_(torch.randn(3, n_cols))
    gradients = []
    for strided in (True, False):
        leaf = (x if strided else x.clone()).detach().requires_grad_()
        gradients += torch.autograd.grad(norm(leaf), leaf, dy if strided else dy.clone())
    assert torch.equal(*gradients)
""")  # fmt: skip
