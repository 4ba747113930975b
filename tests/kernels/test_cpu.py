"""The C kernels against their plain twins, by the rule that holds the Triton ones."""

import math
import os
import subprocess
import sys

import pytest
import torch

from kernels import cpu, reference
from tests.conftest import ROOT
from tests.kernels.twins import (
    INPUTS,
    NORMS,
    assert_as_good_as_twin,
    call,
    draw,
    rope_table,
    run,
    upstream,
)

# not (1, 1): there RMSNorm's dx is what is left of two equal numbers
SHAPES = [(4,), (3, 1), (1, 4), (3, 37), (64, 128), (700, 96), (2, 3, 100), (33, 8192), (1, 3), (4096, 5)]
each = pytest.mark.parametrize("name", INPUTS)
each_norm = pytest.mark.parametrize("name", NORMS)


def inputs_of(name: str, *shape: int, dtype=torch.float32) -> dict[str, torch.Tensor]:
    return INPUTS[name](name, *shape, dtype=dtype)


def same(a: dict, b: dict) -> bool:
    return all(torch.equal(a[key], b[key]) for key in a.keys() | b.keys())


@pytest.fixture
def counted(monkeypatch):
    """Names of the C functions that were called."""
    calls, whole = [], cpu._call
    monkeypatch.setattr(cpu, "_call", lambda name, *args: calls.append(name) or whole(name, *args))
    return calls


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each
def test_as_good_as_the_twin(name, shape, counted):
    assert_as_good_as_twin(name, inputs_of(name, *shape), cpu)
    assert len(counted) == (4 if name == "rope" else 2)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("absent", [(), ("weight",), ("bias",), ("weight", "bias")])
@each_norm
def test_each_parameter_may_be_absent(name, absent, zero_centered):
    inputs = {k: t for k, t in inputs_of(name, 5, 37).items() if k not in absent}
    assert_as_good_as_twin(name, inputs, cpu, zero_centered=zero_centered)


@each
def test_strides_do_not_matter(name):
    """Halves of one matrix, transposed, every second column, expanded; also of the upstream gradient."""
    packed = inputs_of(name, 6, 40)
    views = [lambda t: torch.cat([t, t], -1).chunk(2, -1)[1], lambda t: t.mT.contiguous().mT]
    views += [lambda t: t.repeat_interleave(2, -1)[..., ::2], lambda t: t[..., :1, :].expand_as(t)]
    for view in views:
        strided = {k: view(t) if t.ndim > 1 else t for k, t in packed.items()}
        results = []
        for inputs in (strided, {k: t.contiguous() for k, t in strided.items()}):
            leaves = {k: t.detach().requires_grad_() for k, t in inputs.items()}
            outputs = call(cpu, name, leaves)
            gradients = [view(draw(*y.shape, seed=i, dtype=torch.float32)) for i, y in enumerate(outputs)]
            results.append([*outputs, *torch.autograd.grad(outputs, list(leaves.values()), gradients)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@each
def test_the_same_bits_with_any_number_of_threads(name):
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            results.append(run(cpu, name, inputs_of(name, 300, 160)))
    finally:
        torch.set_num_threads(before)
    assert all(same(results[0], other) for other in results[1:])


@each
def test_only_what_is_asked_for_gets_a_gradient(name):
    for wanted in inputs_of(name, 4, 6):
        results = []
        for home in (cpu, reference):
            leaves = inputs_of(name, 4, 6)
            leaves[wanted].requires_grad_()
            outputs = call(home, name, leaves)
            pairs = [(y, dy) for y, dy in zip(outputs, upstream(outputs), strict=True) if y.requires_grad]
            torch.autograd.backward(*zip(*pairs, strict=True))
            results.append(leaves[wanted].grad)
            assert all(t.grad is None for key, t in leaves.items() if key != wanted)
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("rotated", [2, 6, 10])
def test_some_channels_may_pass_unturned(rotated):
    assert_as_good_as_twin("rope", inputs_of("rope", 2, 5, 10), cpu, rotated=rotated)


def test_gates_of_any_size():
    gate = torch.tensor([-1e30, -200.0, -88.5, -87.5, -50.0, -1e-30, 0.0, 1e-30, 50.0, 88.5, 200.0, 1e30])
    leaves = [gate.clone().requires_grad_(), torch.ones_like(gate).requires_grad_()]
    y = cpu.swiglu(*leaves)
    exact = torch.nn.functional.silu(gate.double())
    torch.testing.assert_close(y.double(), exact, rtol=1e-6, atol=1e-36)
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), leaves))
    assert math.isnan(cpu.swiglu(torch.tensor([math.nan]), torch.ones(1)))


@each_norm
def test_what_is_not_finite_stays_so(name):
    inputs = inputs_of(name, 3, 20)
    inputs["x"][1, 7] = math.nan
    y = call(cpu, name, inputs)[0]
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@each
def test_other_dtypes_are_the_twins(name, dtype, counted):
    inputs = inputs_of(name, 3, 8, dtype=dtype)
    assert same(run(cpu, name, inputs), run(reference, name, inputs))
    assert counted == []


@pytest.mark.parametrize("size", [(0, 8), (2, 0, 8)], ids=str)
def test_nothing_to_do(size, counted):
    for name in INPUTS:
        inputs = inputs_of(name, *size)
        assert same(run(cpu, name, inputs), run(reference, name, inputs))
    assert counted == []


def test_what_does_not_fit_never_reaches_c(counted):
    x, half = torch.ones(2, 4), torch.ones(2, 2)
    bad = [
        lambda: cpu.rms_norm(x, torch.ones(3)),
        lambda: cpu.layer_norm(x, torch.ones(4), torch.ones(5)),
        lambda: cpu.add_rms_norm(x, torch.ones(3, 4)),
        lambda: cpu.swiglu(x, torch.ones(2, 3)),
        lambda: cpu.rope(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 3, 4), half, half),
        lambda: cpu.rope(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), half, half),
        lambda: cpu.rope(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), half, half),
    ]
    for call_it in bad:
        with pytest.raises((RuntimeError, ValueError)):
            call_it()
    cpu.add_rms_norm(x, torch.ones(4))  # broadcast, as the twin's
    cos, sin = rope_table(2, 4)
    cpu.rope(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), cos.requires_grad_(), sin)
    torch.func.grad(lambda t: cpu.rms_norm(t).sum())(x)
    assert counted == []


def built(tmp_path, code="pass", **environment) -> subprocess.CompletedProcess:
    code = f"import torch; from kernels import cpu; {code}; print(cpu.library()._name)"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)} | environment
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_it_is_compiled_once_and_kept(tmp_path):
    first = built(tmp_path)
    (kept,) = (tmp_path / "normgpt").iterdir()
    assert first.stdout.strip() == str(kept)
    assert built(tmp_path, CC="cc", PATH="").stdout == first.stdout


@pytest.mark.parametrize(
    ("environment", "code", "why"),
    [
        ({"CC": "no-such-compiler"}, "pass", "there is no C compiler no-such-compiler: install one, or name it by CC"),
        ({"CC": "false"}, "pass", "false failed: without a word"),
        ({"CC": "cc -no-such-option"}, "pass", "cc -no-such-option failed: "),
        ({}, "cpu.platform.system = lambda: 'Darwin'", "it needs Linux"),
    ],
)
def test_it_says_why_it_cannot_be_built(tmp_path, environment, code, why):
    assert f"CannotBuild: {why}" in built(tmp_path, code, **environment).stderr
    assert not list((tmp_path / "normgpt").glob("*.so"))


def test_a_damaged_build_says_how_to_mend_it(tmp_path):
    path = built(tmp_path).stdout.strip()
    with open(path, "w") as file:
        file.write("damaged")
    assert f"{path} cannot be loaded, delete it" in built(tmp_path).stderr
