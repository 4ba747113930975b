"""The kernels for a CPU, in C: same names and signatures as the Triton ones, for float32; `reference` takes the rest.

`cpu.c` is compiled once for this machine, in about a second, and kept in the user's cache. It needs Linux, a C compiler
with OpenMP, and a PyTorch whose threads are GNU's OpenMP, as the wheels' are: both then share one set of threads.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from pathlib import Path

import torch
from torch.autograd.function import once_differentiable

from kernels import reference
from kernels.eager import PLAIN, eager_apply

SOURCE = Path(__file__).with_suffix(".c")
FLAGS = ["-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
PARTS = 32  # of a sum over rows


class CannotBuild(Exception):
    """Why the kernels cannot be had here, in words."""


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels; CannotBuild where they cannot be compiled, or their threads would not be PyTorch's."""
    if platform.system() != "Linux" or "libgomp" not in Path("/proc/self/maps").read_text():
        raise CannotBuild("it needs Linux, and a PyTorch whose threads are GNU's OpenMP")
    compiler = os.environ.get("CC", "cc")
    about = [line for line in _lines("/proc/cpuinfo") if line.startswith(("model name", "flags", "Features"))]
    key = hashlib.sha256(repr((SOURCE.read_text(), compiler, FLAGS, sorted(set(about)))).encode()).hexdigest()
    built = cache_folder() / f"cpu-{key[:16]}.so"
    if not built.exists():
        _compile(compiler, built)
    try:
        return ctypes.CDLL(str(built))
    except OSError as e:
        raise CannotBuild(f"{built} cannot be loaded, delete it to have it compiled again ({e})") from e


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if os.path.exists(path) else []


def cache_folder() -> Path:
    """The user's cache for this program, or a temporary folder where that cannot be written."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "normgpt"
    with contextlib.suppress(OSError):
        home.mkdir(parents=True, exist_ok=True)
    return home if os.access(home, os.W_OK) else Path(tempfile.mkdtemp(prefix="normgpt-"))


def _compile(compiler: str, built: Path) -> None:
    """Compiles aside and moves there, so that processes that start together do not meet."""
    with tempfile.TemporaryDirectory(dir=built.parent) as aside:
        command = [*shlex.split(compiler), *FLAGS, "-o", f"{aside}/cpu.so", str(SOURCE), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as e:
            raise CannotBuild(f"there is no C compiler {compiler}: install one, or name it by CC") from e
        if done.returncode:
            raise CannotBuild(f"{compiler} failed: {(done.stderr.strip() or 'without a word').splitlines()[0]}")
        os.replace(f"{aside}/cpu.so", built)


def _call(name: str, *args) -> None:
    """Tensors go as pointers, None as NULL, floats as float, all else as int64."""
    getattr(library(), name)(*map(_argument, args))


def _argument(value):
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, float):
        return ctypes.c_float(value)
    return None if value is None else ctypes.c_int64(value)


def _taken(*tensors: torch.Tensor | None) -> bool:
    """Whether the C kernels can read these; `reference` takes, or refuses, all others."""
    if torch._C._are_functorch_transforms_active():
        return False
    given = [t for t in tensors if t is not None]
    return all(t.dtype == torch.float32 and t.is_cpu and t.numel() and t.__class__ in PLAIN for t in given)


def _adjacent(t: torch.Tensor) -> torch.Tensor:
    """t with its last axis adjacent in memory, and no sign to be turned: no copy where it is so already."""
    t = t.resolve_neg()
    return t if t.stride(-1) == 1 else t.contiguous()


def _rows(t: torch.Tensor | None) -> tuple[torch.Tensor | None, int]:
    """(..., N) as (M, N) with adjacent columns, and the stride of its rows."""
    if t is None:
        return None, 0
    t = _adjacent(t.reshape(-1, t.shape[-1]))
    return t, t.stride(0)


# norm


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, gain, bias, eps, center):
        (rows, x_stride), (other, r_stride) = _rows(x), _rows(residual)
        n_rows, n_cols = rows.shape
        y, h = _empty(x), None if residual is None else _empty(x)
        stats = _empty(x, n_rows, 2)  # mean and 1 / sqrt(mean square + eps)
        _call("norm_forward", rows, other, gain, bias, y, h, stats, x_stride, r_stride, n_rows, n_cols, eps, center)
        ctx.save_for_backward(x if h is None else h, gain, stats)
        ctx.center = center
        ctx.set_materialize_grads(False)
        return y if h is None else (y, h)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dh=None):
        h, gain, stats = ctx.saved_tensors
        if dy is None:  # only h was used
            return dh, dh, None, None, None, None
        (gradient, dy_stride), (beside, dh_stride), (rows, h_stride) = _rows(dy), _rows(dh), _rows(h)
        n_rows, n_cols = rows.shape
        dx, dw = _empty(h), _empty(h, PARTS, n_cols)
        db = _empty(h, PARTS, n_cols) if ctx.needs_input_grad[3] else None
        sizes = dy_stride, dh_stride, h_stride, n_rows, n_cols, PARTS
        _call("norm_backward", gradient, beside, rows, gain, stats, dx, dw, db, *sizes, ctx.center)
        x_needs, r_needs, g_needs, _ = ctx.needs_input_grad[:4]
        dx, dr, dw = (t if needs else None for t, needs in ((dx, x_needs), (dx, r_needs), (dw, g_needs)))
        return dx, dr, *(None if parts is None else parts.sum(0) for parts in (dw, db)), None, None


_eager_norm = eager_apply(_Norm)


def _empty(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape or like.shape, dtype=like.dtype)


def _norm(name: str, x, residual, weight, bias, eps: float, zero_centered: bool):
    fit = x.ndim and all(t is None or t.shape == x.shape[-1:] for t in (weight, bias))
    fit = fit and (residual is None or residual.shape == x.shape)
    if not (fit and _taken(x, residual, weight, bias)):
        inputs = {"x": x, "residual": residual, "weight": weight, "bias": bias}
        given = {key: t for key, t in inputs.items() if t is not None}
        return getattr(reference, name)(**given, eps=eps, zero_centered=zero_centered)
    gain = x.new_ones(x.shape[-1]) if weight is None else 1 + weight if zero_centered else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    return _eager_norm(x, residual, gain, bias, float(eps), name.endswith("layer_norm"))


def rms_norm(x, weight=None, eps=1e-5, *, zero_centered=False):
    """As `reference.rms_norm`; float32, one pass over each row forward and one backward, deterministic."""
    return _norm("rms_norm", x, None, weight, None, eps, zero_centered)


def layer_norm(x, weight=None, bias=None, eps=1e-5, *, zero_centered=False):
    """As `reference.layer_norm`, by the same code as `rms_norm` and a mean more."""
    return _norm("layer_norm", x, None, weight, bias, eps, zero_centered)


def add_rms_norm(x, residual, weight=None, eps=1e-5, *, zero_centered=False):
    """As `reference.add_rms_norm`, in one pass; the gradient of h is added in the backward's."""
    return _norm("add_rms_norm", x, residual, weight, None, eps, zero_centered)


def add_layer_norm(x, residual, weight=None, bias=None, eps=1e-5, *, zero_centered=False):
    """As `reference.add_layer_norm`, in one pass."""
    return _norm("add_layer_norm", x, residual, weight, bias, eps, zero_centered)


# swiglu


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        (g, g_stride), (u, u_stride) = _rows(gate), _rows(up)
        y = _empty(gate)
        _call("swiglu_forward", g, u, y, g_stride, u_stride, *g.shape)
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        (d, d_stride), (g, g_stride), (u, u_stride) = _rows(dy), _rows(gate), _rows(up)
        dgate, dup = _empty(gate), _empty(up)
        _call("swiglu_backward", d, g, u, dgate, dup, d_stride, g_stride, u_stride, *g.shape)
        return dgate, dup


_eager_swiglu = eager_apply(_SwiGLU)


def swiglu(gate, up):
    """As `reference.swiglu`, in one pass; e^x to 2 units in the last place."""
    fit = gate.ndim and gate.shape == up.shape
    return _eager_swiglu(gate, up) if fit and _taken(gate, up) else reference.swiglu(gate, up)


# rope


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _turned(q, cos, sin, 1.0), _turned(k, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        return _turned(dq, cos, sin, -1.0), _turned(dk, cos, sin, -1.0), None, None


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    """(B, H, T, D) with the memory of (B, T, H, D), as attention's matrix products want it."""
    x = _adjacent(x)
    batch, n_head, n_time, width = x.shape
    out = _empty(x, batch, n_time, n_head, width)
    args = x, cos, sin, out, *x.stride()[:3], batch, n_head, n_time, width, cos.shape[1], sign
    _call("rope", *args)
    return out.transpose(1, 2)


_eager_rope = eager_apply(_Rope)


def rope(q, k, cos, sin):
    """As `reference.rope`, in one pass over each."""
    fit = q.ndim == k.ndim == 4 and (q.shape[0], *q.shape[2:]) == (k.shape[0], *k.shape[2:])
    fit = fit and cos.shape == sin.shape == (q.shape[2], cos.shape[-1]) and 2 * cos.shape[-1] <= q.shape[3]
    if not (fit and _taken(q, k, cos, sin)) or cos.requires_grad or sin.requires_grad:
        return reference.rope(q, k, cos, sin)
    return _eager_rope(q, k, cos.contiguous(), sin.contiguous())
