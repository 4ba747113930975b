"""What holds for every fused kernel, seen in Triton's interpreter: as good as its plain twin, on whatever layout."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

import kernels
from kernels import glu, norm, reference, rotary
from tests.conftest import ROOT
from tests.kernels.twins import DTYPES, INPUTS, NORMS, assert_as_good_as_twin, call, draw, run, upstream

pytestmark = pytest.mark.usefixtures("bfloat16_rounds_to_nearest")

# one element; odd; one short of a tile; a row per tile; leading axes; wide; several tiles; more tiles than programs
SHAPES = [(4,), (1, 1), (3, 1), (1, 4), (3, 37), (1, 1023), (5, 64), (2, 3, 100), (3, 4097), (64, 32), (11, 2050)]

each_kernel = pytest.mark.parametrize("name", INPUTS)
each_norm = pytest.mark.parametrize("name", NORMS)


def close(ours, theirs, tolerance=1e-12):
    assert ours.keys() == theirs.keys()
    for what in ours:
        error = (ours[what] - theirs[what]).abs().max() if ours[what].numel() else 0
        torch.testing.assert_close(ours[what], theirs[what], rtol=tolerance, atol=tolerance, msg=f"{what}: {error}")


def equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert [what for what in ours if not torch.equal(ours[what], theirs[what])] == []


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


@each_kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_good_as_twin(name, shape, dtype):
    # a lone column is its own norm: dx is what eps leaves of the difference of two equal terms
    options = {"eps": 0.5} if name in NORMS and shape[-1] == 1 else {}
    # where float64 is the truth too, what is left is the order of sums of up to 4097 terms
    slack = 8 if dtype == torch.float64 else 1
    assert_as_good_as_twin(name, INPUTS[name](name, *shape, dtype=dtype), slack=slack, **options)


@each_norm
@pytest.mark.parametrize("n_cols", [1, 3, 7, 31, 33, 123, 255, 257, 1000, 1025, 1500])
def test_any_row_length(name, n_cols):
    assert_as_good_as_twin(name, INPUTS[name](name, 3, n_cols), slack=8, eps=0.5 if n_cols == 1 else 1e-5)


@each_norm
@pytest.mark.parametrize(("shape", "dtype"), [
    ((3, 8201), torch.float16), ((3, 8201), torch.bfloat16), ((5, 16385), torch.float32), ((10, 2100), torch.float64),
], ids=str)  # fmt: skip
def test_rows_in_chunks(name, shape, dtype):
    """Wider than registers hold; of five tiles one falls to a program that had one before."""
    assert_as_good_as_twin(name, INPUTS[name](name, *shape, dtype=dtype), slack=8 if dtype == torch.float64 else 1)


@pytest.mark.parametrize(
    ("name", "n_cols"), [*((name, 64) for name in NORMS), ("layer_norm", 8300), ("add_layer_norm", 8300)]
)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_far_from_zero(name, dtype, n_cols):
    """A mean a hundred times the spread: statistics kept in the low precision, or E[x²] - mean², would show."""
    inputs = INPUTS[name](name, 3, n_cols, dtype=dtype)
    assert_as_good_as_twin(name, inputs | {"x": (10 + 0.1 * inputs["x"].float()).to(dtype)})


@each_kernel
def test_gradcheck(name):
    inputs = INPUTS[name](name, 2, 4) if name == "rope" else INPUTS[name](name, 3, 6)
    keys = list(inputs)
    fused = lambda *leaves: call(kernels, name, dict(zip(keys, leaves, strict=True)))  # noqa: E731
    assert torch.autograd.gradcheck(fused, [t.requires_grad_() for t in inputs.values()])


@each_kernel
def test_only_the_gradients_asked_for(name):
    inputs = INPUTS[name](name, 5, 8)
    full = run(kernels, name, inputs)
    for wanted in itertools.product([False, True], repeat=len(inputs)):
        leaves = {k: t.detach().clone().requires_grad_(w) for (k, t), w in zip(inputs.items(), wanted, strict=True)}
        outputs = call(kernels, name, leaves)
        if not any(wanted):
            assert not any(y.requires_grad for y in outputs)
            continue
        torch.autograd.backward(outputs, upstream(outputs))
        for key, leaf in leaves.items():
            assert torch.equal(leaf.grad, full[f"d{key}"]) if leaf.requires_grad else leaf.grad is None


@each_kernel
def test_no_work_for_gradients_nobody_asked_for(name, monkeypatch):
    """Of the first input alone: one launch, with no sums over the rows after it."""
    launched = []
    for module in (norm, glu, rotary):
        monkeypatch.setattr(module, "launch", lambda kernel, *_: launched.append(kernel))
    inputs = INPUTS[name](name, 5, 8)
    first = next(iter(inputs))
    outputs = call(kernels, name, {k: t.detach().requires_grad_(k == first) for k, t in inputs.items()})
    launched.clear()
    torch.autograd.backward(outputs[0], upstream(outputs)[0])
    assert len(launched) == 1


# each makes a tensor of the same values and other strides
LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "every second column": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "transposed": lambda t: t.mT.contiguous().mT,
    "a slice of a wider row": lambda t: torch.cat([t, t, t], -1)[..., t.shape[-1] : 2 * t.shape[-1]],
    "one row expanded": lambda t: t[:1].expand_as(t),
    "one element expanded": lambda t: t.flatten()[:1].reshape((1,) * t.ndim).expand_as(t),
}


@each_kernel
@pytest.mark.parametrize("of_input", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_strides_change_nothing(name, of_input):
    """Each layout of the inputs with each layout of the upstream gradients."""
    strided = {k: of_input(t) if t.ndim > 1 else t for k, t in INPUTS[name](name, 4, 6).items()}
    strided = {k: t.detach().requires_grad_() for k, t in strided.items()}
    plain = {k: t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for k, t in strided.items()}
    outputs, expected = (call(kernels, name, inputs) for inputs in (strided, plain))
    assert all(y.is_contiguous() and torch.equal(y, z) for y, z in zip(outputs, expected, strict=True))
    for of_gradient in LAYOUTS.values():
        dys = [of_gradient(dy) for dy in upstream(outputs)]
        plain_dys = [dy.clone(memory_format=torch.contiguous_format) for dy in dys]
        ours = torch.autograd.grad(outputs, list(strided.values()), dys, retain_graph=True)
        theirs = torch.autograd.grad(expected, list(plain.values()), plain_dys, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(dys, plain_dys, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(strided.values(), plain.values(), strict=True))


@each_kernel
def test_views_that_stand_for_their_negative(name):
    inputs = INPUTS[name](name, 4, 6)
    negated = {k: torch._neg_view(-t) for k, t in inputs.items()}
    assert all(t.is_neg() for t in negated.values())
    outputs, expected = call(kernels, name, negated), call(kernels, name, inputs)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


@each_kernel
def test_leading_axes_in_any_order(name):
    inputs = INPUTS[name](name, 2, 3, 4, 8)
    inputs = {k: t.transpose(0, 2) if t.ndim > 2 and name != "rope" else t for k, t in inputs.items()}
    close(run(kernels, name, inputs), run(reference, name, inputs))


@each_kernel
@pytest.mark.parametrize("downstream", [
    lambda y, x: torch.cat([x, y], dim=-1).square(),
    lambda y, x: y.split([2, 4], dim=-1)[1] * 2,
    lambda y, x: y.sum() + (x * y).mean(),
    lambda y, x: x + y,  # the residual stream, which must find dy as it was
])  # fmt: skip
def test_downstream_views(name, downstream):
    inputs, results = INPUTS[name](name, 4, 6), []
    for home in (kernels, reference):
        leaves = {k: t.detach().clone().requires_grad_() for k, t in inputs.items()}
        z = downstream(call(home, name, leaves)[0], next(iter(leaves.values())))
        gradients = torch.autograd.grad(z, list(leaves.values()), draw(*z.shape, seed=3), allow_unused=True)
        results.append(dict(enumerate((z.detach(), *(g for g in gradients if g is not None)))))
    close(*results)


@each_kernel
def test_backward_twice_gives_the_same(name):
    leaves = {k: t.requires_grad_() for k, t in INPUTS[name](name, 4, 6).items()}
    outputs = call(kernels, name, leaves)
    dys = upstream(outputs)
    kept = [dy.clone() for dy in dys]
    first, second = (torch.autograd.grad(outputs, list(leaves.values()), dys, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(dys, kept, strict=True))


@each_kernel
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_empty_batch(name, shape):
    if name == "rope" and shape[-2] == 0:
        shape = (0, 3, 8)
    inputs = INPUTS[name](name, *shape)
    results = run(kernels, name, inputs)
    for key, t in inputs.items():
        assert results[f"d{key}"].shape == t.shape
        assert not results[f"d{key}"].any()


@each_kernel
def test_deterministic(name):
    inputs = INPUTS[name](name, 40, 300, dtype=torch.float32)
    first = run(kernels, name, inputs)
    for _ in range(2):
        equal(run(kernels, name, inputs), first)


@each_norm
def test_a_row_does_not_depend_on_its_neighbours(name):
    inputs = INPUTS[name](name, 11, 100, dtype=torch.float32)
    alone = {k: t[7] if t.ndim > 1 else t for k, t in inputs.items()}
    for whole, row in zip(call(kernels, name, inputs), call(kernels, name, alone), strict=True):
        assert torch.equal(whole[7], row)


@each_kernel
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(name, mode):
    inputs = {k: t.requires_grad_() for k, t in INPUTS[name](name, 4, 8).items()}
    expected = call(kernels, name, inputs)
    with mode():
        outputs = call(kernels, name, inputs)
    assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(outputs, expected, strict=True))


@each_kernel
def test_autocast_changes_nothing(name):
    inputs = INPUTS[name](name, 4, 16, dtype=torch.float32)
    inputs = {k: t.bfloat16() if t.ndim > 1 else t for k, t in inputs.items()}
    with torch.autocast("cpu", torch.bfloat16):
        inside = run(kernels, name, inputs)
    equal(inside, run(kernels, name, inputs))
    for key, t in inputs.items():
        assert inside[f"d{key}"].dtype == t.dtype
    assert_as_good_as_twin(name, inputs)


@each_kernel
def test_second_derivative_is_refused(name):
    inputs = {k: t.requires_grad_() for k, t in INPUTS[name](name, 2, 4).items()}
    (y, *_), first = call(kernels, name, inputs), next(iter(inputs.values()))
    (dx,) = torch.autograd.grad(y.square().sum(), first, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@each_kernel
def test_func_transforms_are_refused(name):
    inputs = INPUTS[name](name, 2, 4)
    loss = lambda inputs: call(kernels, name, inputs)[0].sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match=r"torch\.func transforms; kernels=torch"):
        torch.func.grad(loss)(inputs)
    stacked = {k: torch.stack([t, t]) for k, t in inputs.items()}
    with pytest.raises(NotImplementedError, match=r"torch\.func transforms; kernels=torch"):
        torch.func.vmap(loss)(stacked)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's tracer and Inductor raise their own
@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, backend) for name in INPUTS for backend in ("eager", "aot_eager", "inductor")
     if backend != "inductor" or name in ("layer_norm", "add_rms_norm", "swiglu", "rope")],
)  # fmt: skip
def test_compiles_whole(name, backend):
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    # a new number of rows becomes a symbol, a new number of axes a new graph; Inductor is slow and gets one shape
    for shape in [(3, 8), (5, 8), (2, 1, 3, 8)][: 1 if backend == "inductor" else 3]:
        inputs = INPUTS[name](name, *shape)
        expected = run(kernels, name, inputs)
        leaves = {k: t.detach().clone().requires_grad_() for k, t in inputs.items()}
        outputs = compiled(kernels, name, leaves)
        gradients = torch.autograd.grad(outputs, list(leaves.values()), upstream(outputs))
        for ours, theirs in zip((*outputs, *gradients), expected.values(), strict=True):
            torch.testing.assert_close(ours, theirs)


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
for name in kernels.__all__:
    try:
        getattr(kernels, name)
    except ImportError as error:
        print(error)
""")  # fmt: skip
    assert out.count("Triton, which is not installed: choose kernels=torch") == len(INPUTS)
    with pytest.raises(AttributeError, match="no attribute 'no_such_norm'"):
        _ = kernels.no_such_norm


def test_table_is_complete():
    assert set(INPUTS) == set(kernels.__all__)
