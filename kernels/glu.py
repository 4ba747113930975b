"""SwiGLU without its matrix products, fused: the gate's sigmoid is computed again in the backward, not kept."""

import functools

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from kernels.eager import eager_apply
from kernels.launch import ACC, INSTEAD, MAX_COLS, OPTIONS, cdiv, check, launch, operator, rows

# M rows (all leading axes together), N columns


@triton.jit(do_not_specialize=["n_rows"])
def _forward_kernel(
    gate_ptr, up_ptr, y_ptr, gate_stride, up_stride, n_rows, n_cols,
    ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A tile per program; tiles run along the columns first."""
    across = (n_cols - 1) // BLOCK_N + 1
    row = (tl.program_id(0) // across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (row < n_rows) & (cols < n_cols)
    gate = tl.load(gate_ptr + row * gate_stride + cols, mask=mask, other=0.0).to(ACC)
    up = tl.load(up_ptr + row * up_stride + cols, mask=mask, other=0.0).to(ACC)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, dy_stride, gate_stride, up_stride, n_rows, n_cols,
    ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """With s = sigmoid(gate): dup = dy · gate · s, dgate = dy · up · s · (1 + gate · (1 - s))."""
    across = (n_cols - 1) // BLOCK_N + 1
    row = (tl.program_id(0) // across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (row < n_rows) & (cols < n_cols)
    dy = tl.load(dy_ptr + row * dy_stride + cols, mask=mask, other=0.0).to(ACC)
    gate = tl.load(gate_ptr + row * gate_stride + cols, mask=mask, other=0.0).to(ACC)
    s = 1.0 / (1.0 + tl.exp(-gate))
    if dup_ptr is not None:
        dup = dy * gate * s
        tl.store(dup_ptr + row * n_cols + cols, dup.to(dup_ptr.dtype.element_ty), mask=mask)
    if dgate_ptr is not None:
        up = tl.load(up_ptr + row * up_stride + cols, mask=mask, other=0.0).to(ACC)
        dgate = dy * up * s * (1.0 + gate * (1.0 - s))
        tl.store(dgate_ptr + row * n_cols + cols, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)


@functools.cache
def _plan(n_cols, dtype):
    """Launch parameters: tiles of 2048 elements, 16 a thread, which narrow rows share."""
    block_n = min(triton.next_power_of_2(n_cols), 2048)
    block_m = min(2048 // block_n, 64)
    return {"ACC": ACC[dtype], "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": 4, **OPTIONS}


def _launch(kernel, like, *args):
    n_cols = like.shape[-1]
    n_rows = like.numel() // n_cols
    plan = _plan(n_cols, like.dtype)
    programs = cdiv(n_rows, plan["BLOCK_M"]) * cdiv(n_cols, plan["BLOCK_N"])
    launch(kernel, programs, like, (*args, n_rows, n_cols), plan)


def _empty_forward(gate, up):
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


def _forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """y, contiguous."""
    y = _empty_forward(gate, up)
    (gate, gate_stride), (up, up_stride) = rows(gate), rows(up)
    _launch(_forward_kernel, y, gate, up, y, gate_stride, up_stride)
    return y


def _empty_backward(dy, gate, up, needs):
    return tuple(t.new_empty(t.shape) if needed else None for t, needed in zip((gate, up), needs, strict=True))


def _backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, needs: list[bool]
) -> tuple[torch.Tensor, torch.Tensor]:
    """dgate and dup, contiguous; None for one that `needs` does not ask for."""
    out = _empty_backward(dy, gate, up, needs)
    (dy, dy_stride), (gate, gate_stride), (up, up_stride) = rows(dy), rows(gate), rows(up)
    _launch(_backward_kernel, dy, dy, gate, up, *out, dy_stride, gate_stride, up_stride)
    return out


_forward_op = operator("swiglu_forward", _forward, _empty_forward)
_backward_op = operator("swiglu_backward", _backward, _empty_backward)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return (_forward_op if torch.compiler.is_compiling() else _forward)(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        needs = list(ctx.needs_input_grad)
        backward = _backward_op if torch.compiler.is_compiling() else _backward
        gradients = backward(dy, *ctx.saved_tensors, needs)
        return tuple(g if need else None for g, need in zip(gradients, needs, strict=True))


_eager_swiglu = eager_apply(_SwiGLU)


def swiglu(gate, up):
    """y = gate · sigmoid(gate) · up (Shazeer 2020, eq. 6, without its matrix products).

    gate and up of one shape (..., N) and any strides (so the halves of one matrix product) -> contiguous (..., N).
    Computed in float32 (float64 for float64 gate), y in gate.dtype, gradients in the dtypes of their inputs.
    Moves 3·b bytes an element forward (b = itemsize), 5·b backward. Deterministic; differentiable once.
    TypeError for dtypes other than the four floating ones and for DTensor; NotImplementedError under torch.func;
    ValueError for unequal shapes, N = 0 or N > 2³⁰, or a CPU tensor outside Triton's interpreter.
    """
    check(("gate", "up"), gate, up)
    if gate.shape != up.shape or gate.ndim == 0 or not 0 < gate.shape[-1] <= MAX_COLS:
        raise ValueError(
            f"gate and up must have one shape, 1 to {MAX_COLS} wide, got {tuple(gate.shape)} and {tuple(up.shape)}; "
            f"{INSTEAD}"
        )
    return (_SwiGLU.apply if torch.compiler.is_compiling() else _eager_swiglu)(gate, up)
