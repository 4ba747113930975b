"""The six kernels as one table, and the rule that holds them to their plain twins."""

import torch

import kernels
from kernels import reference
from scripts.check_kernels import worst

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rope_table(n_time, rotated):
    """cos and sin (T, R/2), float32, of angles that differ everywhere."""
    frequency = 100.0 ** -torch.linspace(0, 1, rotated // 2, dtype=torch.float64)
    angle = torch.outer(torch.arange(n_time, dtype=torch.float64), frequency)
    return angle.cos().float(), angle.sin().float()


def norm_inputs(name, *shape, dtype=torch.float64):
    """x [, residual], weight around 1 [, bias around 0]."""
    n = shape[-1:]
    inputs = {"x": draw(*shape), "weight": 1 + 0.3 * draw(*n, seed=1)}
    if name.startswith("add_"):
        inputs["residual"] = draw(*shape, seed=4)
    if name.endswith("layer_norm"):
        inputs["bias"] = 0.3 * draw(*n, seed=2)
    return {key: t.to(dtype) for key, t in inputs.items()}


def swiglu_inputs(name, *shape, dtype=torch.float64):
    return {"gate": 2 * draw(*shape, dtype=dtype), "up": draw(*shape, seed=1, dtype=dtype)}


def rope_inputs(name, *shape, dtype=torch.float64):
    """(..., T, D) -> q of three heads, k of one, in the layout of a projection; D is rounded up to an even number."""
    *batch, n_time, width = (1,) * max(0, 2 - len(shape)) + shape
    b, width = torch.Size(batch).numel(), width + width % 2
    q, k = (draw(b, n_time, heads, width, seed=heads, dtype=dtype).transpose(1, 2) for heads in (3, 1))
    return {"q": q, "k": k}


INPUTS = {
    "rms_norm": norm_inputs,
    "layer_norm": norm_inputs,
    "add_rms_norm": norm_inputs,
    "add_layer_norm": norm_inputs,
    "swiglu": swiglu_inputs,
    "rope": rope_inputs,
}
NORMS = [name for name in INPUTS if name.endswith("norm")]


def call(home, name, inputs, **options):
    """The outputs of home.name as a tuple. RoPE turns all channels, or `rotated` of them."""
    if name == "rope":
        rotated = options.pop("rotated", inputs["q"].shape[-1])
        options |= dict(zip(("cos", "sin"), rope_table(inputs["q"].shape[2], rotated), strict=True))
    out = getattr(home, name)(**inputs, **options)
    return out if isinstance(out, tuple) else (out,)


def upstream(outputs):
    """A random gradient for each output, of values that every dtype holds."""
    return [draw(*y.shape, seed=10 + i).bfloat16().to(y.dtype) for i, y in enumerate(outputs)]


def run(home, name, inputs, dtype=None, **options):
    """{what: tensor}: the outputs and, from random upstream gradients, the gradients of fresh leaves cast to dtype."""
    leaves = {key: t.detach().to(dtype or t.dtype, copy=True).requires_grad_() for key, t in inputs.items()}
    outputs = call(home, name, leaves, **options)
    gradients = torch.autograd.grad(outputs, list(leaves.values()), upstream(outputs))
    results = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    return results | {f"d{key}": g for key, g in zip(leaves, gradients, strict=True)}


def assert_as_good_as_twin(name, inputs, home=kernels, slack=1, **options):
    """Every output and gradient by the rule of `worst`, the truth being the twin in float64."""
    ours, theirs = (run(functions, name, inputs, **options) for functions in (home, reference))
    exact = run(reference, name, inputs, torch.float64, **options)
    for what, truth in exact.items():
        assert (ours[what].dtype, ours[what].shape) == (theirs[what].dtype, theirs[what].shape), what
        n_terms = exact["output 0"].numel() // truth.numel() if what in ("dweight", "dbias") else 1
        error, allowed = worst(ours[what], theirs[what], truth, slack, n_terms)
        assert error <= allowed, f"{what}: error {error:.3g}, allowed {allowed:.3g}"
