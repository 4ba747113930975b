"""RMSNorm and LayerNorm over the last axis, fused, each also with the residual add before it.

The two norms differ by CENTER alone. A row as wide as registers hold is read once, several narrow rows to a program; a
wider one goes in chunks of columns, read twice. An absent residual, parameter or gradient is a None pointer: Triton
compiles one variant per combination, free of dead work.
"""

import functools

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from kernels.eager import eager_apply
from kernels.launch import (
    ACC,
    INSTEAD,
    MAX_COLS,
    OPTIONS,
    WIDE,
    cdiv,
    check,
    launch,
    multiprocessors,
    operator,
    rows,
)

# M rows (all leading axes together), N columns (the normalised axis), G programs of the backward grid


@triton.jit
def _load_sum(x_ptr, r_ptr, h_ptr, x_at, r_at, h_at, mask, ACC: tl.constexpr):
    """x, or h = x + residual, kept and rounded before it is normalised: whoever adds to it next reads it so."""
    x = tl.load(x_ptr + x_at, mask=mask, other=0.0).to(ACC)
    if r_ptr is not None:
        h = (x + tl.load(r_ptr + r_at, mask=mask, other=0.0).to(ACC)).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + h_at, h, mask=mask)
        x = h.to(ACC)
    return x


@triton.jit
def _load_gain(w_ptr, cols, mask, ZERO_CENTERED: tl.constexpr, ACC: tl.constexpr):
    gain = tl.load(w_ptr + cols, mask=mask, other=0.0).to(ACC)
    if ZERO_CENTERED:
        gain += 1.0
    return gain


@triton.jit(do_not_specialize=["n_rows"])
def _forward_kernel(
    x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, h_ptr, stats_ptr, x_stride, r_stride, n_rows, n_cols,
    EPS: tl.constexpr, CENTER: tl.constexpr, ZERO_CENTERED: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A tile of whole rows per program."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    row_mask, col_mask = row < n_rows, cols < n_cols
    mask = row_mask[:, None] & col_mask[None, :]
    x_at, r_at = row[:, None] * x_stride + cols[None, :], row[:, None] * r_stride + cols[None, :]
    at = row[:, None] * n_cols + cols[None, :]
    x = _load_sum(x_ptr, r_ptr, h_ptr, x_at, r_at, at, mask, ACC)
    if CENTER:
        mean = tl.sum(x, axis=1) / n_cols
        tl.store(stats_ptr + n_rows + row, mean, mask=row_mask)
        x = tl.where(mask, x - mean[:, None], 0.0)  # the padding must not count in the variance
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n_cols + EPS)
    tl.store(stats_ptr + row, rstd, mask=row_mask)
    y = x * rstd[:, None]
    if w_ptr is not None:
        y *= _load_gain(w_ptr, cols, col_mask, ZERO_CENTERED, ACC)[None, :]
    if b_ptr is not None:
        y += tl.load(b_ptr + cols, mask=col_mask, other=0.0).to(ACC)[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _forward_wide_kernel(
    x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, h_ptr, stats_ptr, x_stride, r_stride, n_rows, n_cols,
    EPS: tl.constexpr, CENTER: tl.constexpr, ZERO_CENTERED: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A row per program, in chunks. LayerNorm too takes its statistics in one pass: each lane keeps a mean and a sum of
    squares about it (Welford 1962), and the lanes are merged at the end (Chan et al. 1979)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_N)
    lane_mean = tl.zeros((BLOCK_N,), ACC)
    lane_squares = tl.zeros((BLOCK_N,), ACC)
    for start in range(0, n_cols, BLOCK_N):
        cols = start + lane
        mask = cols < n_cols
        at = row * n_cols + cols
        x = _load_sum(x_ptr, r_ptr, h_ptr, row * x_stride + cols, row * r_stride + cols, at, mask, ACC)
        if CENTER:
            off = tl.where(mask, x - lane_mean, 0.0)
            lane_mean += off / (start // BLOCK_N + 1)
            lane_squares += off * (x - lane_mean)
        else:
            lane_squares += x * x
    if CENTER:
        count = (n_cols - lane + BLOCK_N - 1) // BLOCK_N
        mean = tl.sum(lane_mean * count, axis=0) / n_cols
        tl.store(stats_ptr + n_rows + row, mean)
        lane_squares += count * (lane_mean - mean) * (lane_mean - mean)
    rstd = tl.rsqrt(tl.sum(lane_squares, axis=0) / n_cols + EPS)
    tl.store(stats_ptr + row, rstd)
    if r_ptr is None:
        source_ptr = x_ptr + row * x_stride
    else:
        source_ptr = h_ptr + row * n_cols
        tl.debug_barrier()  # what this program wrote is read again
    for start in range(0, n_cols, BLOCK_N):
        cols = start + lane
        mask = cols < n_cols
        x = tl.load(source_ptr + cols, mask=mask, other=0.0).to(ACC)
        if CENTER:
            x -= mean
        y = x * rstd
        if w_ptr is not None:
            y *= _load_gain(w_ptr, cols, mask, ZERO_CENTERED, ACC)
        if b_ptr is not None:
            y += tl.load(b_ptr + cols, mask=mask, other=0.0).to(ACC)
        tl.store(y_ptr + row * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_dx(dx, dh_ptr, dx_ptr, dr_ptr, dh_at, at, mask, ACC: tl.constexpr):
    """Adds what reached h from elsewhere; x and the residual have one gradient, in two dtypes where theirs differ."""
    if dh_ptr is not None:
        dx += tl.load(dh_ptr + dh_at, mask=mask, other=0.0).to(ACC)
    if dx_ptr is not None:
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if dr_ptr is not None:
        tl.store(dr_ptr + at, dx.to(dr_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _backward_kernel(
    dy_ptr, dh_ptr, h_ptr, w_ptr, stats_ptr, dx_ptr, dr_ptr, dw_ptr, db_ptr,
    dy_stride, dh_stride, h_stride, n_rows, n_cols, CENTER: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """With x̂ = (h - mean) · rstd and g = dy · gain: dx = rstd · (g - mean(g) - x̂ · mean(g · x̂)) [+ dh].

    RMSNorm has neither mean. dw and db hold one partial row per program, Σ dy · x̂ and Σ dy over the rows it visited.
    """
    cols = tl.arange(0, BLOCK_N)
    col_mask = cols < n_cols
    partial = tl.program_id(0).to(tl.int64) * n_cols + cols
    # whole tiles, folded once after the loop: a sum across rows crosses warps
    dw = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    db = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for tile in tl.range(tl.program_id(0), (n_rows - 1) // BLOCK_M + 1, tl.num_programs(0), num_stages=STAGES):
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        row_mask = row < n_rows
        mask = row_mask[:, None] & col_mask[None, :]
        # dy = 0 in the padding, so whatever x̂ is there adds nothing to any sum
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(ACC)
        x_hat = tl.load(h_ptr + row[:, None] * h_stride + cols[None, :], mask=mask, other=0.0).to(ACC)
        if CENTER:
            x_hat -= tl.load(stats_ptr + n_rows + row, mask=row_mask, other=0.0)[:, None]
        rstd = tl.load(stats_ptr + row, mask=row_mask, other=0.0)[:, None]
        x_hat *= rstd
        if dw_ptr is not None:
            dw += dy * x_hat
        if db_ptr is not None:
            db += dy
        if dx_ptr is not None or dr_ptr is not None:
            g = dy
            if w_ptr is not None:
                g *= _load_gain(w_ptr, cols, col_mask, ZERO_CENTERED, ACC)[None, :]
            dx = g - x_hat * (tl.sum(g * x_hat, axis=1) / n_cols)[:, None]
            if CENTER:
                dx -= (tl.sum(g, axis=1) / n_cols)[:, None]
            dh_at, at = row[:, None] * dh_stride + cols[None, :], row[:, None] * n_cols + cols[None, :]
            _store_dx(dx * rstd, dh_ptr, dx_ptr, dr_ptr, dh_at, at, mask, ACC)
    if dw_ptr is not None:
        tl.store(dw_ptr + partial, tl.sum(dw, axis=0), mask=col_mask)
    if db_ptr is not None:
        tl.store(db_ptr + partial, tl.sum(db, axis=0), mask=col_mask)


@triton.jit
def _add_to(part_ptr, cols, value, later, mask):
    tl.store(part_ptr + cols, tl.load(part_ptr + cols, mask=mask & later, other=0.0) + value, mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _backward_wide_kernel(
    dy_ptr, dh_ptr, h_ptr, w_ptr, stats_ptr, dx_ptr, dr_ptr, dw_ptr, db_ptr,
    dy_stride, dh_stride, h_stride, n_rows, n_cols, CENTER: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same in chunks of columns, read once for the two means and once for dx. dw and db do not fit registers: each
    program adds up its own partial row in memory, which no other touches."""
    partial = tl.program_id(0).to(tl.int64) * n_cols
    for tile in range(tl.program_id(0), (n_rows - 1) // BLOCK_M + 1, tl.num_programs(0)):
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        row_mask = row < n_rows
        rstd = tl.load(stats_ptr + row, mask=row_mask, other=0.0)[:, None]
        mean = tl.load(stats_ptr + n_rows + row, mask=row_mask, other=0.0)[:, None] if CENTER else 0.0
        g_x_hat = tl.zeros((BLOCK_M, BLOCK_N), ACC)
        g_sum = tl.zeros((BLOCK_M, BLOCK_N), ACC)
        if dx_ptr is not None or dr_ptr is not None:
            for start in tl.range(0, n_cols, BLOCK_N, num_stages=STAGES):
                cols = start + tl.arange(0, BLOCK_N)
                mask = row_mask[:, None] & (cols < n_cols)[None, :]
                g = tl.load(dy_ptr + row[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(ACC)
                h = tl.load(h_ptr + row[:, None] * h_stride + cols[None, :], mask=mask, other=0.0).to(ACC)
                if w_ptr is not None:
                    g *= _load_gain(w_ptr, cols, cols < n_cols, ZERO_CENTERED, ACC)[None, :]
                g_x_hat += g * ((h - mean) * rstd)
                if CENTER:
                    g_sum += g
        mean_g_x_hat = (tl.sum(g_x_hat, axis=1) / n_cols)[:, None]
        mean_g = (tl.sum(g_sum, axis=1) / n_cols)[:, None]
        tl.debug_barrier()  # the partial row is read below as the tile before left it
        for start in tl.range(0, n_cols, BLOCK_N, num_stages=STAGES):
            cols = start + tl.arange(0, BLOCK_N)
            col_mask = cols < n_cols
            mask = row_mask[:, None] & col_mask[None, :]
            g = tl.load(dy_ptr + row[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(ACC)
            h = tl.load(h_ptr + row[:, None] * h_stride + cols[None, :], mask=mask, other=0.0).to(ACC)
            x_hat = (h - mean) * rstd
            later = tile >= tl.num_programs(0)  # the first tile finds nothing there yet
            if dw_ptr is not None:
                _add_to(dw_ptr + partial, cols, tl.sum(g * x_hat, axis=0), later, col_mask)
            if db_ptr is not None:
                _add_to(db_ptr + partial, cols, tl.sum(g, axis=0), later, col_mask)
            if dx_ptr is not None or dr_ptr is not None:
                if w_ptr is not None:
                    g *= _load_gain(w_ptr, cols, col_mask, ZERO_CENTERED, ACC)[None, :]
                dx = g - x_hat * mean_g_x_hat
                if CENTER:
                    dx -= mean_g
                dh_at, at = row[:, None] * dh_stride + cols[None, :], row[:, None] * n_cols + cols[None, :]
                _store_dx(dx * rstd, dh_ptr, dx_ptr, dr_ptr, dh_at, at, mask, ACC)


@triton.jit
def _fold(parts_ptr, out_ptr, n_parts, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), parts_ptr.dtype.element_ty)
    for first in range(0, n_parts, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)[:, None].to(tl.int64)
        mask = (row < n_parts) & (cols < n_cols)[None, :]
        total += tl.load(parts_ptr + row * n_cols + cols[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=cols < n_cols)


@triton.jit(do_not_specialize=["n_parts"])
def _fold_kernel(
    dw_parts_ptr, db_parts_ptr, dw_ptr, db_ptr, n_parts, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """dw and db from their partial rows, (G, N) -> (N,), summed in one order and rounded once."""
    if dw_ptr is not None:
        _fold(dw_parts_ptr, dw_ptr, n_parts, n_cols, BLOCK_M, BLOCK_N)
    if db_ptr is not None:
        _fold(db_parts_ptr, db_ptr, n_parts, n_cols, BLOCK_M, BLOCK_N)


# Launch parameters depend on N and the dtype alone, so that a row's result does not depend on its neighbours. They are
# what compiles without spilling a register (`scripts/compile_ahead.py`). N not being a multiple of 16, rows are not
# aligned and elements come one by one, whose addresses take half the registers.
def _bytes_a_thread(n_cols):
    return 16 if n_cols % 16 else 32


def _tile(n_cols, itemsize):
    """Whole rows, several to a tile where they are narrow."""
    each = _bytes_a_thread(n_cols)
    block_n = triton.next_power_of_2(n_cols)
    block_m = max(1, min(8 if n_cols % 16 else 64, 256 * each // (block_n * itemsize)))
    num_warps = min(max(block_m * block_n * itemsize // (32 * each), 4), 16)
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps}


def _is_wide(n_cols, itemsize):
    return n_cols * itemsize > 512 * _bytes_a_thread(n_cols)


# `maxnreg` bounds the registers of a thread so that two programs share a multiprocessor; left to itself, the assembler
# at times spills one to fit in more.
@functools.cache
def _forward_plan(n_cols, dtype, eps, center, zero_centered):
    """Kernel, rows a program, launch parameters."""
    flags = {"EPS": eps, "CENTER": center, "ZERO_CENTERED": zero_centered, "ACC": ACC[dtype], **OPTIONS}
    if _is_wide(n_cols, dtype.itemsize):
        block_n = 8192 if dtype.itemsize <= 4 else 4096
        return _forward_wide_kernel, 1, {**flags, "BLOCK_N": block_n, "num_warps": 16}
    tile = _tile(n_cols, dtype.itemsize)
    most = {"maxnreg": 64} if tile["num_warps"] == 16 else {}
    return _forward_kernel, tile["BLOCK_M"], {**flags, **tile, **most}


@functools.cache
def _backward_plan(n_cols, dtype, center, zero_centered):
    """Kernel, rows a tile, programs a multiprocessor, launch parameters.

    As many programs as fit by their registers; more would only lengthen the sum over partial rows. Each reads ahead by
    a tile, but where that tile has many rows.
    """
    flags = {"CENTER": center, "ZERO_CENTERED": zero_centered, "ACC": ACC[dtype], "maxnreg": 128, **OPTIONS}
    if not _is_wide(n_cols, dtype.itemsize):
        tile = _tile(n_cols, dtype.itemsize)
        stages = 2 if tile["BLOCK_M"] <= 8 else 1
        programs = 2 if tile["num_warps"] <= 8 else 1
        return _backward_kernel, tile["BLOCK_M"], programs, {**flags, **tile, "STAGES": stages}
    # Two rows at once halve the additions to partial rows. Of wider ones a level-2 cache of 50 MB would not hold two
    # for each program until they are read again; nor, at the widest, one and the partial rows too.
    block_m, programs = (2, 2) if n_cols <= 16384 else (1, 2 if n_cols <= 32768 else 1)
    tile = {"BLOCK_M": block_m, "BLOCK_N": 2048 // block_m, "num_warps": 8, "STAGES": 2}
    return _backward_wide_kernel, block_m, programs, {**flags, **tile}


_FOLD = {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8, **OPTIONS}


def _empty_forward(x, residual, weight, bias, eps, center, zero_centered):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if residual is not None and residual.dtype != x.dtype:
        y = torch.empty_like(y, dtype=torch.promote_types(x.dtype, residual.dtype))
    n_rows = x.numel() // x.shape[-1]
    stats = torch.empty(2 * n_rows if center else n_rows, dtype=WIDE[y.dtype], device=x.device)
    return y, None if residual is None else torch.empty_like(y), stats


def _forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None,
    eps: float, center: bool, zero_centered: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """y (..., N), h (..., N) or None without residual, and per row rstd, then for LayerNorm the mean, (M,) or (2M,)."""
    y, h, stats = _empty_forward(x, residual, weight, bias, eps, center, zero_centered)
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    kernel, block_m, constants = _forward_plan(n_cols, y.dtype, eps, center, zero_centered)
    x, x_stride = rows(x)
    residual, r_stride = (None, 0) if residual is None else rows(residual)
    weight = None if weight is None else weight.contiguous().resolve_neg()
    bias = None if bias is None else bias.contiguous().resolve_neg()
    args = x, residual, weight, bias, y, h, stats, x_stride, r_stride, n_rows, n_cols
    launch(kernel, cdiv(n_rows, block_m), y, args, constants)
    return y, h, stats


def _empty_backward(dy, dh, h, weight, stats, center, zero_centered, *dtypes):
    sizes = (h.shape, h.shape, h.shape[-1:], h.shape[-1:])
    return tuple(None if d is None else h.new_empty(size, dtype=d) for size, d in zip(sizes, dtypes, strict=True))


def _backward(
    dy: torch.Tensor, dh: torch.Tensor | None, h: torch.Tensor, weight: torch.Tensor | None, stats: torch.Tensor,
    center: bool, zero_centered: bool, x_dtype: torch.dtype | None, r_dtype: torch.dtype | None,
    w_dtype: torch.dtype | None, b_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dx, dr (..., N), dw, db (N,), each in the dtype given for it, or None where that is: not asked for."""
    n_cols = h.shape[-1]
    n_rows = h.numel() // n_cols
    out = _empty_backward(dy, dh, h, weight, stats, center, zero_centered, x_dtype, r_dtype, w_dtype, b_dtype)
    kernel, block_m, occupancy, constants = _backward_plan(n_cols, h.dtype, center, zero_centered)
    programs = min(cdiv(n_rows, block_m), occupancy * multiprocessors(h.device))
    dx, dr, dw, db = out
    dw_parts, db_parts = (None if d is None else stats.new_empty(programs, n_cols) for d in (dw, db))
    (dy, dy_stride), (h, h_stride) = rows(dy), rows(h)
    dh, dh_stride = (None, 0) if dh is None else rows(dh)
    weight = None if weight is None else weight.contiguous().resolve_neg()
    args = dy, dh, h, weight, stats, dx, dr, dw_parts, db_parts, dy_stride, dh_stride, h_stride, n_rows, n_cols
    launch(kernel, programs, h, args, constants)
    if dw is not None or db is not None:
        launch(_fold_kernel, cdiv(n_cols, 32), h, (dw_parts, db_parts, dw, db, programs, n_cols), _FOLD)
    return out


_forward_op = operator("norm_forward", _forward, _empty_forward)
_backward_op = operator("norm_backward", _backward, _empty_backward)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, bias, options):
        forward = _forward_op if torch.compiler.is_compiling() else _forward
        y, h, stats = forward(x, residual, weight, bias, *options)
        if residual is None:
            ctx.save_for_backward(x, weight, bias, stats)
            ctx.options = options, x.dtype, None
            return y
        ctx.save_for_backward(h, weight, bias, stats)
        ctx.options = options, x.dtype, residual.dtype
        ctx.set_materialize_grads(False)
        return y, h

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dh=None):
        h, weight, bias, stats = ctx.saved_tensors
        (_, *flags), *dtypes = ctx.options
        dtypes += [None if t is None else t.dtype for t in (weight, bias)]
        needs = ctx.needs_input_grad[:4]
        x_dtype, r_dtype, w_dtype, b_dtype = (d if need else None for d, need in zip(dtypes, needs, strict=True))
        if dy is None:  # only h was used, if anything
            return *(None if dh is None or d is None else dh.to(d) for d in (x_dtype, r_dtype)), None, None, None
        alike = dtypes[0] == dtypes[1]  # then x and the residual share one gradient
        if alike:
            x_dtype, r_dtype = x_dtype or r_dtype, None
        backward = _backward_op if torch.compiler.is_compiling() else _backward
        dx, dr, dw, db = backward(dy, dh, h, weight, stats, *flags, x_dtype, r_dtype, w_dtype, b_dtype)
        gradients = (dx, dx if alike else dr, dw, db)
        return *(g if need else None for g, need in zip(gradients, needs, strict=True)), None


_eager_norm = eager_apply(_Norm)


def _check_vector(name, t, n_cols):
    if t is not None and (t.ndim != 1 or t.numel() != n_cols):
        raise ValueError(
            f"{name} must have shape ({n_cols},), the last dimension of x, got {tuple(t.shape)}; {INSTEAD}"
        )


def _norm(x, residual, weight, bias, options):
    check(("x", "residual", "weight", "bias"), x, residual, weight, bias)
    n_cols = x.size(-1) if x.ndim else 0
    if not 0 < n_cols <= MAX_COLS:
        raise ValueError(f"the last dimension of x must be 1 to {MAX_COLS}, got shape {tuple(x.shape)}; {INSTEAD}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual is {tuple(residual.shape)} and x {tuple(x.shape)}: make them equal; {INSTEAD}")
    _check_vector("weight", weight, n_cols)
    _check_vector("bias", bias, n_cols)
    apply = _Norm.apply if torch.compiler.is_compiling() else _eager_norm
    return apply(x, residual, weight, bias, options)


def rms_norm(x, weight=None, eps=1e-5, *, zero_centered=False):
    """y = x / sqrt(mean(x²) + eps) · weight over the last axis (Zhang & Sennrich 2019, eq. 4).

    x (..., N) of any strides, weight (N,) or None -> contiguous (..., N).
    Statistics and gain in float32 (float64 for float64 x), y and dx in x.dtype, dweight in weight.dtype; autocast
    changes none. zero_centered: the gain is 1 + weight, added in that same precision.
    Moves 2·b bytes an element (b = itemsize) forward, 3·b backward. Rows of more than 16 KB (8 KB, where N is no
    multiple of 16) are read twice, the second time from the cache if it holds them; their backward also adds up dw and
    db in memory, 8 bytes an element each (4 up to 16384 columns). Deterministic; differentiable once.
    TypeError for dtypes other than the four floating ones and for DTensor; NotImplementedError under torch.func;
    ValueError for N = 0 or N > 2³⁰, a weight that does not fit x, or a CPU tensor outside Triton's interpreter.
    """
    return _norm(x, None, weight, None, (eps, False, zero_centered))


def layer_norm(x, weight=None, bias=None, eps=1e-5, *, zero_centered=False):
    """y = (x - mean(x)) / sqrt(mean((x - mean(x))²) + eps) · weight + bias over the last axis (Ba et al. 2016, eq. 4).

    As `rms_norm`; bias (N,) or None, with or without weight, dbias in bias.dtype.
    """
    return _norm(x, None, weight, bias, (eps, True, zero_centered))


def add_rms_norm(x, residual, weight=None, eps=1e-5, *, zero_centered=False):
    """h = x + residual and rms_norm(h) in one pass -> (y, h), both (..., N), contiguous and differentiable.

    x and residual (..., N) of one shape; h and y in the dtype that torch's own x + residual would have, h rounded to it
    before it is normalised. Gradients in the dtypes of their inputs; that of h is added to that of y in the same pass.
    Moves 4·b bytes an element forward and 4·b backward where apart they would be 5·b and 6·b. Otherwise as `rms_norm`.
    """
    return _norm(x, residual, weight, None, (eps, False, zero_centered))


def add_layer_norm(x, residual, weight=None, bias=None, eps=1e-5, *, zero_centered=False):
    """h = x + residual and layer_norm(h) in one pass -> (y, h): as `add_rms_norm`, with `layer_norm`'s bias."""
    return _norm(x, residual, weight, bias, (eps, True, zero_centered))
