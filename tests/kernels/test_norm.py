"""The fused norms in Triton's interpreter, held against their plain twins; and compiled, unrun, for two GPUs."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import kernels
from kernels import norm, reference

pytestmark = pytest.mark.usefixtures("bfloat16_rounds_to_nearest")

ROOT = Path(__file__).parents[2]
NORMS = {"rms_norm": ("weight",), "layer_norm": ("weight", "bias")}
# one element; odd; one short of a tile; a row per tile; leading axes; wide; several tiles; more tiles than programs
SHAPES = [(4,), (1, 1), (3, 1), (1, 4), (3, 37), (1, 1023), (5, 64), (2, 3, 100), (3, 4097), (64, 32), (11, 2050)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]

each_norm = pytest.mark.parametrize("name", NORMS)


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def draw_inputs(name, *shape, dtype=torch.float64):
    """x, then the parameters of the norm around 1 and 0."""
    weight, bias = 1 + 0.3 * draw(shape[-1], seed=1), 0.3 * draw(shape[-1], seed=2)
    return [t.to(dtype) for t in (draw(*shape), weight, bias)[: 1 + len(NORMS[name])]]


def run(fn, inputs, dy, dtype=None, **options):
    """[y, dx, dweight, ...] from fresh leaves, cast to dtype."""
    leaves = [t.detach().to(dtype or t.dtype, copy=True).requires_grad_() for t in inputs]
    y = fn(*leaves, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def assert_as_good_as_twin(name, inputs, dy, scale_eps=1, **options):
    fused, twin = getattr(kernels, name), getattr(reference, name)
    fused_results, twin_results = (run(fn, inputs, dy, **options) for fn in (fused, twin))
    exact = run(twin, inputs, dy, torch.float64, **options)
    names = ["y", "dx", "dweight", "dbias"][: len(exact)]
    for what, ours, theirs, truth in zip(names, fused_results, twin_results, exact, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), what
        error, yardstick = ((t.double() - truth).abs().max() for t in (ours, theirs))
        allowed = 2 * yardstick + scale_eps * torch.finfo(ours.dtype).eps * truth.abs().max()
        assert error <= allowed, f"{what}: error {error:.3g}, the twin's {yardstick:.3g}, allowed {allowed:.3g}"


def test_interpreter_rounds_bfloat16():
    """The fixture reaches into Triton's internals: without it every bfloat16 test below would be off by a unit."""

    @triton.jit
    def cast(x_ptr, y_ptr, N: tl.constexpr):
        at = tl.arange(0, N)
        tl.store(y_ptr + at, tl.load(x_ptr + at).to(tl.bfloat16))

    x = torch.cat([torch.tensor([0.1, 1.99999, float("nan"), float("inf"), 1e-40]), draw(59, dtype=torch.float32)])
    y = torch.empty(64, dtype=torch.bfloat16)
    cast[(1,)](x, y, 64)
    torch.testing.assert_close(y, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


@each_norm
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_good_as_twin(name, shape, dtype):
    # where float64 is the truth too, what is left is the order of sums of up to 4097 terms
    scale_eps = 8 if dtype == torch.float64 else 1
    # a lone column is its own norm: dx is what eps leaves of the difference of two equal terms
    eps = 0.5 if shape[-1] == 1 else 1e-5
    dy = draw(*shape, seed=3, dtype=dtype)
    assert_as_good_as_twin(name, draw_inputs(name, *shape, dtype=dtype), dy, scale_eps, eps=eps)


@each_norm
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_far_from_zero(name, dtype):
    """A mean a hundred times the spread: statistics kept in the low precision, or E[x²] - mean², would show."""
    x, *parameters = draw_inputs(name, 6, 64, dtype=dtype)
    assert_as_good_as_twin(name, [(10 + 0.1 * x), *parameters], draw(6, 64, seed=3, dtype=dtype))


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(
    ("name", "present"),
    [(name, names[:n]) for name, names in NORMS.items() for n in range(len(names) + 1)] + [("layer_norm", ("bias",))],
)
def test_each_parameter_may_be_absent(name, present, zero_centered):
    x, weight, bias = draw_inputs("layer_norm", 5, 37)
    parameters = {which: {"weight": weight, "bias": bias}[which] for which in present}

    def named(fn):
        return lambda x, *values: fn(x, **dict(zip(parameters, values, strict=True)), zero_centered=zero_centered)

    inputs, dy = [x, *parameters.values()], draw(5, 37, seed=3)
    ours, theirs = (run(named(getattr(home, name)), inputs, dy) for home in (kernels, reference))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@each_norm
def test_only_the_gradients_asked_for(name, monkeypatch):
    computed = {}

    def spy(*args):
        computed["gradients"] = backward(*args)
        return computed["gradients"]

    backward = norm._backward
    monkeypatch.setattr(norm, "_backward", spy)
    inputs = draw_inputs(name, 5, 8)
    full = run(getattr(kernels, name), inputs, draw(5, 8, seed=3))[1:]
    for wanted in itertools.product([False, True], repeat=len(inputs)):
        if not any(wanted):
            continue
        leaves = [t.detach().clone().requires_grad_(want) for t, want in zip(inputs, wanted, strict=True)]
        getattr(kernels, name)(*leaves).backward(draw(5, 8, seed=3))
        for leaf, want, expected in zip(leaves, wanted, full, strict=True):
            assert torch.equal(leaf.grad, expected) if want else leaf.grad is None
        assert [t.numel() > 0 for t in computed["gradients"]][: len(inputs)] == list(wanted)


# each makes a (4, 6) tensor of other strides
LAYOUTS = {
    "every second column": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "every second row": lambda t: t.repeat_interleave(2, 0)[::2],
    "transposed": lambda t: t.mT.contiguous().mT,
    "one row expanded": lambda t: t[:1].expand_as(t),
    "one element expanded": lambda t: t[:1, :1].expand_as(t),
    "a slice of a wider row": lambda t: torch.cat([t, t], -1)[:, 3:9],
}


@each_norm
@pytest.mark.parametrize("which", ["x", "dy"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_strides_change_nothing(name, layout, which):
    (x, *parameters), dy = draw_inputs(name, 4, 6), draw(4, 6, seed=3)
    x, dy = (layout(x), dy) if which == "x" else (x, layout(dy))
    x_before, dy_before = x.clone(), dy.clone()
    leaves = [t.detach().requires_grad_() for t in (x, *parameters)]
    y = getattr(kernels, name)(*leaves)
    gradients = torch.autograd.grad(y, leaves, dy)
    expected = run(getattr(kernels, name), [x.contiguous(), *parameters], dy.contiguous())
    assert y.is_contiguous()
    for ours, theirs in zip((y, *gradients), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(leaves[0], x_before)
    assert torch.equal(dy, dy_before)


@each_norm
def test_leading_axes_in_any_order(name):
    (x, *parameters), dy = draw_inputs(name, 2, 3, 4, 8), draw(4, 3, 2, 8, seed=3)
    x = x.transpose(0, 2)
    fused, twin = (run(getattr(home, name), [x, *parameters], dy) for home in (kernels, reference))
    torch.testing.assert_close(fused, twin, rtol=1e-12, atol=1e-12)


@each_norm
@pytest.mark.parametrize(
    "downstream",
    [
        lambda y, x: torch.cat([x, y], dim=-1).square(),
        lambda y, x: y.split([2, 4], dim=-1)[1] * 2,
        lambda y, x: y.sum() + (x * y).mean(),
        lambda y, x: x + y,  # the residual stream, which must find dy as it was
    ],
)
def test_downstream_views(name, downstream):
    def through(home):
        return lambda x, *parameters: downstream(getattr(home, name)(x, *parameters), x)

    inputs = draw_inputs(name, 4, 6)
    dy = draw(*through(reference)(*inputs).shape, seed=3)
    ours, theirs = (run(through(home), inputs, dy) for home in (kernels, reference))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@each_norm
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_empty_batch(name, shape):
    y, dx, *parameters = run(getattr(kernels, name), draw_inputs(name, *shape), draw(*shape))
    assert y.shape == dx.shape == shape
    assert all(torch.equal(gradient, torch.zeros(8, dtype=gradient.dtype)) for gradient in parameters)


@each_norm
def test_backward_is_deterministic(name):
    inputs, dy = draw_inputs(name, 11, 2050, dtype=torch.float32), draw(11, 2050, seed=3, dtype=torch.float32)
    first, *others = (run(getattr(kernels, name), inputs, dy) for _ in range(10))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@each_norm
def test_a_row_does_not_depend_on_its_neighbours(name):
    x, *parameters = draw_inputs(name, 11, 100, dtype=torch.float32)
    fused = getattr(kernels, name)
    assert torch.equal(fused(x, *parameters)[7], fused(x[7], *parameters))


@each_norm
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_extreme_rows_stay_finite(name, dtype):
    x, *parameters = draw_inputs(name, 5, 64, dtype=dtype)
    x = x * torch.tensor([[0.0], [1e4], [1e-4], [1.0], [1.0]], dtype=dtype)
    x[3] = 3.0
    dy = draw(5, 64, seed=3, dtype=dtype)
    y, *gradients = run(getattr(kernels, name), [x, *parameters], dy)
    assert all(t.isfinite().all() for t in (y, *gradients))
    if name == "layer_norm":
        assert torch.equal(y[[0, 3]], parameters[1].expand(2, -1))
    else:
        assert torch.equal(y[0], torch.zeros_like(y[0]))


@each_norm
def test_gradcheck(name):
    inputs = [t.requires_grad_() for t in draw_inputs(name, 3, 5)]
    assert torch.autograd.gradcheck(getattr(kernels, name), inputs)


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
def test_autocast_keeps_dtypes(name):
    x, *parameters = draw_inputs(name, 4, 16, dtype=torch.float32)
    inputs = [x.bfloat16(), *parameters]
    with torch.autocast("cpu", torch.bfloat16):
        y, dx, *gradients = run(getattr(kernels, name), inputs, draw(4, 16, seed=3))
    assert y.dtype == dx.dtype == torch.bfloat16
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    outside = run(getattr(kernels, name), inputs, draw(4, 16, seed=3))
    assert all(torch.equal(a, b) for a, b in zip((y, dx, *gradients), outside, strict=True))
    assert_as_good_as_twin(name, inputs, draw(4, 16, seed=3))


@each_norm
def test_second_derivative_is_refused(name):
    x = draw(2, 4).requires_grad_()
    (dx,) = torch.autograd.grad(getattr(kernels, name)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def both_norms(x, weight, bias):
    return kernels.layer_norm(kernels.rms_norm(x, weight, zero_centered=True), weight, bias)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's tracer and Inductor raise their own
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiles_whole(backend):
    torch.compiler.reset()
    compiled = torch.compile(both_norms, fullgraph=True, backend=backend)
    # a new number of rows becomes a symbol, a new number of axes a new graph; Inductor is slow and gets one shape
    for shape in [(3, 8), (5, 8), (2, 1, 3, 8)][: 1 if backend == "inductor" else 3]:
        inputs, dy = draw_inputs("layer_norm", *shape), draw(*shape, seed=3)
        torch.testing.assert_close(run(compiled, inputs, dy), run(both_norms, inputs, dy))


@pytest.mark.parametrize("center", [False, True])
def test_operators_keep_their_promises(center):
    x, weight, bias = draw_inputs("layer_norm", 3, 8)
    forward = (x, weight, bias if center else None, 1e-5, center, False)
    _, mean, rstd = norm._forward(*forward)
    torch.library.opcheck(norm._forward_op, forward)
    for needs in ([True, True, center], [True, False, False], [False, True, False]):
        torch.library.opcheck(norm._backward_op, (draw(3, 8, seed=3), x, weight, mean, rstd, center, False, needs))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(2, 4, dtype=torch.int64),), TypeError, "x must be a floating point tensor, got torch.int64"),
        ((torch.ones(2, 4), torch.ones(4, dtype=torch.int64)), TypeError, "weight must be a floating point tensor"),
        ((torch.ones(2, 4), torch.ones(3)), ValueError, r"weight must have shape \(4,\).* got \(3,\)"),
        ((torch.ones(2, 4), torch.ones(1, 4)), ValueError, r"weight must have shape \(4,\).* got \(1, 4\)"),
        ((torch.ones(2, 4), torch.ones(4, device="meta")), ValueError, "weight is on meta and x on cpu"),
        ((torch.ones(()),), ValueError, "the last dimension of x must be 1 to 65536"),
        ((torch.ones(2, 0),), ValueError, r"1 to 65536, got shape \(2, 0\)"),
        ((torch.ones(1, 65537),), ValueError, "choose kernels=torch"),
    ],
)
@each_norm
def test_bad_input(name, arguments, error, message):
    with pytest.raises(error, match=message):
        getattr(kernels, name)(*arguments)


def test_bad_bias():
    with pytest.raises(ValueError, match=r"bias must have shape \(4,\)"):
        kernels.layer_norm(torch.ones(2, 4), bias=torch.ones(5))


def python(*arguments, **environment):
    """stdout of a fresh interpreter; an environment value of None unsets the variable."""
    merged = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    merged = {name: value for name, value in merged.items() if value is not None}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=merged, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_lazy_and_triton_optional():
    out = python("-c", """
import sys
sys.modules["triton"] = None  # what an absent package looks like to import
import kernels
assert "torch" not in sys.modules
from kernels import reference
try:
    from kernels import rms_norm
except ImportError as error:
    print(error)
""")  # fmt: skip
    assert "Triton, which is not installed: choose kernels=torch" in out
    with pytest.raises(AttributeError, match="no attribute 'no_such_norm'"):
        _ = kernels.no_such_norm


def test_offsets_beyond_int32():
    """Three rows 2³⁰ elements apart, in a process of its own because a wrapped offset ends in a segmentation fault.

    The stride itself must fit int32: one that does not would arrive as int64 and widen the product.
    """
    python("-c", """
import torch
from kernels import layer_norm
memory = torch.empty(2**31 + 4096, dtype=torch.bfloat16)  # virtual: only the touched pages become resident
x, dy = (memory.as_strided((3, 8), (2**30, 1), offset) for offset in (0, 64))
x.copy_(torch.randn(3, 8)), dy.copy_(torch.randn(3, 8))
gradients = []
for strided in (True, False):
    leaf = (x if strided else x.clone()).detach().requires_grad_()
    gradients += torch.autograd.grad(layer_norm(leaf), leaf, dy if strided else dy.clone())
assert torch.equal(*gradients)
""")  # fmt: skip


@pytest.fixture(scope="module")
def compiled_ahead(tmp_path_factory):
    script = Path(__file__).with_name("ahead_of_time.py")
    cache = tmp_path_factory.mktemp("triton")
    return json.loads(python(str(script), TRITON_INTERPRET=None, TRITON_CACHE_DIR=str(cache)))


def test_compiles_for_gpus_without_waste(compiled_ahead):
    assert compiled_ahead["kernels"]
    for kernel in compiled_ahead["kernels"]:
        assert kernel["STACK"] == 0, f"{kernel['case']} spills registers"
        assert not kernel["f64"], f"{kernel['case']} computes in float64"
        # one row of tensors; the statistics of the rows come one by one
        assert sum(".v4" in load for load in kernel["global_loads"]) >= 4, f"{kernel['case']} has narrow loads"


def test_cpu_outside_the_interpreter_is_refused(compiled_ahead):
    assert "set TRITON_INTERPRET=1" in compiled_ahead["refusal"]
    assert "kernels=torch" in compiled_ahead["refusal"]
