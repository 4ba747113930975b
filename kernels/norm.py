"""RMSNorm and LayerNorm over the last axis, fused: one forward and one backward Triton kernel serve both.

The two differ by CENTER alone. A tile holds BLOCK_M whole rows, so each element of x (and of dy) is read once.
An absent weight, bias or gradient is a None pointer: Triton compiles one variant per combination, free of dead work.
Every load is widened to ACC at once: the interpreter's bfloat16 arithmetic works on raw bits, and rows of float64 get
statistics in float64, which gradcheck needs.
"""

import functools

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

# M rows (all leading axes together), N columns (the normalised axis), G programs of the backward grid


@triton.jit(do_not_specialize=["n_rows"])
def _forward_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, x_stride, n_rows, n_cols,
    eps: tl.float64,  # as a float32 argument eps would reach float64 rows already rounded
    CENTER: tl.constexpr, ZERO_CENTERED: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    row_mask, col_mask = rows < n_rows, cols < n_cols
    mask = row_mask[:, None] & col_mask[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(ACC)
    if CENTER:
        mean = tl.sum(x, axis=1) / n_cols
        tl.store(mean_ptr + rows, mean, mask=row_mask)
        x = tl.where(mask, x - mean[:, None], 0.0)  # the padding must not count in the variance
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n_cols + tl.full((), eps, ACC))
    tl.store(rstd_ptr + rows, rstd, mask=row_mask)
    y = x * rstd[:, None]
    if w_ptr is not None:
        gain = tl.load(w_ptr + cols, mask=col_mask, other=0.0).to(ACC)
        if ZERO_CENTERED:
            gain += 1.0
        y *= gain[None, :]
    if b_ptr is not None:
        y += tl.load(b_ptr + cols, mask=col_mask, other=0.0).to(ACC)[None, :]
    tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _backward_kernel(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, dy_stride, x_stride, n_rows, n_cols,
    CENTER: tl.constexpr, ZERO_CENTERED: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """With x̂ = (x - mean) · rstd and g = dy · gain: dx = rstd · (g - mean(g) - x̂ · mean(g · x̂)).

    RMSNorm has neither mean. dw and db hold one partial row per program, Σ dy · x̂ and Σ dy over the rows it visited.
    """
    cols = tl.arange(0, BLOCK_N)
    col_mask = cols < n_cols
    partial = tl.program_id(0).to(tl.int64) * n_cols + cols
    if w_ptr is not None:
        gain = tl.load(w_ptr + cols, mask=col_mask, other=0.0).to(ACC)
        if ZERO_CENTERED:
            gain += 1.0
    # whole tiles, folded once after the loop: a sum across rows crosses warps
    dw = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    db = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for tile in range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        row_mask = rows < n_rows
        mask = row_mask[:, None] & col_mask[None, :]
        # dy = 0 in the padding, so whatever x̂ is there adds nothing to any sum
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(ACC)
        x_hat = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(ACC)
        if CENTER:
            x_hat -= tl.load(mean_ptr + rows, mask=row_mask, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)[:, None]
        x_hat *= rstd
        if dw_ptr is not None:
            dw += dy * x_hat
        if db_ptr is not None:
            db += dy
        if dx_ptr is not None:
            g = dy
            if w_ptr is not None:
                g *= gain[None, :]
            dx = g - x_hat * (tl.sum(g * x_hat, axis=1) / n_cols)[:, None]
            if CENTER:
                dx -= (tl.sum(g, axis=1) / n_cols)[:, None]
            dx *= rstd
            tl.store(dx_ptr + rows[:, None] * n_cols + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if dw_ptr is not None:
        tl.store(dw_ptr + partial, tl.sum(dw, axis=0), mask=col_mask)
    if db_ptr is not None:
        tl.store(db_ptr + partial, tl.sum(db, axis=0), mask=col_mask)


INTERPRETED = not isinstance(_forward_kernel, triton.JITFunction)
MAX_COLS = 65536
_ACC = {torch.float32: tl.float32, torch.float64: tl.float64}
_CPU_PROGRAMS = 4


def _tile(n_cols):
    """BLOCK_M, BLOCK_N and num_warps. They depend on N alone, so a row's result does not depend on its neighbours.

    16 elements a thread keep x̂, dy, dw and db in registers up to N = 8192; the backward of wider rows spills.
    """
    block_n = triton.next_power_of_2(n_cols)
    block_m = max(1, min(64, 4096 // block_n))
    num_warps = min(max(block_m * block_n // (32 * 16), 4), 32)
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps}


def _backward_programs(device, n_rows, tile):
    """As many as fit a multiprocessor by their registers; more would only lengthen the sum over partial rows."""
    if device.type == "cpu":
        most = _CPU_PROGRAMS
    else:
        most = _multiprocessors(device) * (2 if tile["num_warps"] <= 8 else 1)
    return min(triton.cdiv(n_rows, tile["BLOCK_M"]), most)


@functools.cache
def _multiprocessors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count


def _rows(t):
    """(..., N) -> (M, N) with adjacent columns: a view wherever the strides allow one."""
    t = t.reshape(-1, t.shape[-1])
    return t if t.stride(-1) == 1 else t.contiguous()


def _vector(t):
    return None if t is None else t.contiguous()


def _empty_forward(x, weight, bias, eps, center, zero_centered):
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    mean = torch.empty_like(rstd) if center else rstd.new_empty(0)
    return x.new_empty(x.shape), mean, rstd


def _forward(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
    eps: float, center: bool, zero_centered: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """y (..., N), mean (...) or (0,) for RMSNorm, rstd (...); every output is contiguous."""
    y, mean, rstd = _empty_forward(x, weight, bias, eps, center, zero_centered)
    rows, tile = _rows(x), _tile(x.shape[-1])
    with torch.cuda.device_of(x):
        _forward_kernel[(triton.cdiv(len(rows), tile["BLOCK_M"]),)](
            rows, _vector(weight), _vector(bias), y, mean if center else None, rstd, rows.stride(0), *rows.shape, eps,
            CENTER=center, ZERO_CENTERED=zero_centered, ACC=_ACC[rstd.dtype], **tile,
        )  # fmt: skip
    return y, mean, rstd


def _empty_backward(dy, x, weight, mean, rstd, center, zero_centered, needs):
    n_cols = x.shape[-1]
    needs_x, needs_weight, needs_bias = needs
    vectors = (rstd.new_empty(n_cols if needed else 0) for needed in (needs_weight, needs_bias))
    return x.new_empty(x.shape if needs_x else 0), *vectors


def _backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, mean: torch.Tensor, rstd: torch.Tensor,
    center: bool, zero_centered: bool, needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dx (..., N), dw (N,), db (N,), the last two in the dtype of rstd; one that `needs` does not ask for is (0,)."""
    dx, dw, db = _empty_backward(dy, x, weight, mean, rstd, center, zero_centered, needs)
    dy_rows, x_rows, tile = _rows(dy), _rows(x), _tile(x.shape[-1])
    programs = _backward_programs(x.device, len(x_rows), tile)
    dw_parts, db_parts = (rstd.new_empty(programs, len(d)) if len(d) else None for d in (dw, db))
    with torch.cuda.device_of(x):
        _backward_kernel[(programs,)](
            dy_rows, x_rows, _vector(weight), mean if center else None, rstd, dx if needs[0] else None,
            dw_parts, db_parts, dy_rows.stride(0), x_rows.stride(0), *x_rows.shape,
            CENTER=center, ZERO_CENTERED=zero_centered, ACC=_ACC[rstd.dtype], **tile,
        )  # fmt: skip
    return dx, dw if dw_parts is None else dw_parts.sum(0), db if db_parts is None else db_parts.sum(0)


# torch.compile needs opaque operators of known output shapes; eager calls go without, at a fifth of the cost per call
_forward_op = torch.library.custom_op("normgpt::norm_forward", _forward, mutates_args=())
_forward_op.register_fake(_empty_forward)
_backward_op = torch.library.custom_op("normgpt::norm_backward", _backward, mutates_args=())
_backward_op.register_fake(_empty_backward)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, center, zero_centered):
        forward = _forward_op if torch.compiler.is_compiling() else _forward
        y, mean, rstd = forward(x, weight, bias, eps, center, zero_centered)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.center, ctx.zero_centered, ctx.bias_dtype = center, zero_centered, None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, mean, rstd = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:3])
        backward = _backward_op if torch.compiler.is_compiling() else _backward
        dx, dw, db = backward(dy, x, weight, mean, rstd, ctx.center, ctx.zero_centered, needs)
        return (
            dx if needs[0] else None,
            dw.to(weight.dtype) if needs[1] else None,
            db.to(ctx.bias_dtype) if needs[2] else None,
            None, None, None,
        )  # fmt: skip


def _check(x, **vectors):
    if not x.is_floating_point():
        raise TypeError(f"x must be a floating point tensor, got {x.dtype}")
    if x.ndim == 0 or not 0 < x.shape[-1] <= MAX_COLS:
        raise ValueError(
            f"the last dimension of x must be 1 to {MAX_COLS}, got shape {tuple(x.shape)}; "
            "choose kernels=torch for wider rows"
        )
    if x.device.type == "cpu" and not INTERPRETED:
        raise ValueError(
            "x is on the CPU, where Triton compiles nothing: set TRITON_INTERPRET=1 before starting Python "
            "to run in Triton's interpreter, or choose kernels=torch"
        )
    for name, t in vectors.items():
        if t is None:
            continue
        if not t.is_floating_point():
            raise TypeError(f"{name} must be a floating point tensor, got {t.dtype}")
        if t.shape != x.shape[-1:]:
            raise ValueError(f"{name} must have shape ({x.shape[-1]},), the last dimension of x, got {tuple(t.shape)}")
        if t.device != x.device:
            raise ValueError(f"{name} is on {t.device} and x on {x.device}; move one to the other")


def rms_norm(x, weight=None, eps=1e-5, *, zero_centered=False):
    """y = x / sqrt(mean(x²) + eps) · weight over the last axis (Zhang & Sennrich 2019, eq. 4).

    x (..., N) of any strides, weight (N,) or None -> contiguous (..., N), N <= 65536.
    Statistics and gain in float32 (float64 for float64 x), y and dx in x.dtype, dweight in weight.dtype; autocast
    changes none. zero_centered: the gain is 1 + weight, added in that same precision.
    Deterministic; differentiable once. TypeError for integers; ValueError for N = 0, N too wide, a weight that does not
    fit x, or a CPU tensor outside Triton's interpreter.
    """
    _check(x, weight=weight)
    return _Norm.apply(x, weight, None, eps, False, zero_centered)


def layer_norm(x, weight=None, bias=None, eps=1e-5, *, zero_centered=False):
    """y = (x - mean(x)) / sqrt(mean((x - mean(x))²) + eps) · weight + bias over the last axis (Ba et al. 2016, eq. 4).

    x (..., N) of any strides, weight and bias (N,) or None, either alone too -> contiguous (..., N), N <= 65536.
    Statistics and gain in float32 (float64 for float64 x), y and dx in x.dtype, dweight and dbias in their own dtypes;
    autocast changes none. zero_centered: the gain is 1 + weight, added in that same precision.
    Deterministic; differentiable once. TypeError for integers; ValueError for N = 0, N too wide, a weight or bias that
    does not fit x, or a CPU tensor outside Triton's interpreter.
    """
    _check(x, weight=weight, bias=bias)
    return _Norm.apply(x, weight, bias, eps, True, zero_centered)
