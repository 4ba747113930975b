"""Rotary position embedding of q and k in one launch; the backward turns the other way."""

import functools

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from kernels.eager import eager_apply
from kernels.launch import ACC, INSTEAD, OPTIONS, cdiv, check, launch, operator

# B batch, H query heads, Hkv key heads, T time, D head width, R rotated channels


@triton.jit(do_not_specialize=["n_time", "q_heads", "k_heads"])
def _kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, n_time, q_heads, k_heads,
    q_batch, q_head, q_time, k_batch, k_head, k_time, cos_time, sin_time, out_head,
    D: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr, ACC: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """A program turns BLOCK_T positions of up to HEADS heads, of q or of k, by one reading of the table."""
    q_groups, k_groups = tl.cdiv(q_heads, HEADS), tl.cdiv(k_heads, HEADS)
    group = tl.program_id(0) % (q_groups + k_groups)
    block = tl.program_id(0) // (q_groups + k_groups)
    blocks = tl.cdiv(n_time, BLOCK_T)
    batch = (block // blocks).to(tl.int64)
    time = (block % blocks * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64))[:, None]
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (time < n_time) & (pair < HALF)
    cos = tl.load(cos_ptr + time * cos_time + pair, mask=mask, other=0.0).to(ACC)
    sin = tl.load(sin_ptr + time * sin_time + pair, mask=mask, other=0.0).to(ACC)
    if BACK:
        sin = -sin
    if group < q_groups:
        first, heads, from_stride = group * HEADS, q_heads, tl.cast(q_head, tl.int64)
        from_ptr = q_ptr + batch * q_batch + first.to(tl.int64) * q_head + time * q_time
        to_ptr = q_out_ptr + (batch * q_heads + first) * out_head + time * D
    else:
        first, heads, from_stride = (group - q_groups) * HEADS, k_heads, tl.cast(k_head, tl.int64)
        from_ptr = k_ptr + batch * k_batch + first.to(tl.int64) * k_head + time * k_time
        to_ptr = k_out_ptr + (batch * k_heads + first) * out_head + time * D
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    rest_mask = (time < n_time) & (rest < D)
    for _ in range(first, tl.minimum(first + HEADS, heads)):
        a = tl.load(from_ptr + pair, mask=mask, other=0.0).to(ACC)
        b = tl.load(from_ptr + HALF + pair, mask=mask, other=0.0).to(ACC)
        tl.store(to_ptr + pair, (a * cos - b * sin).to(q_out_ptr.dtype.element_ty), mask=mask)
        tl.store(to_ptr + HALF + pair, (b * cos + a * sin).to(q_out_ptr.dtype.element_ty), mask=mask)
        if D > 2 * HALF:
            tl.store(to_ptr + rest, tl.load(from_ptr + rest, mask=rest_mask, other=0.0), mask=rest_mask)
        from_ptr += from_stride
        to_ptr += out_head


HEADS = 8  # heads a program turns with one reading of the table


@functools.cache
def _plan(head_width, half, dtype, back):
    """Launch parameters: 1024 pairs of channels of each head, of at the most 64 positions."""
    block_half = triton.next_power_of_2(half)
    return {
        "D": head_width,
        "HALF": half,
        "BACK": back,
        "ACC": ACC[dtype],
        "HEADS": HEADS,
        "BLOCK_T": max(1, min(1024 // block_half, 64)),
        "BLOCK_HALF": block_half,
        "BLOCK_REST": triton.next_power_of_2(max(head_width - 2 * half, 1)),
        "num_warps": 4,
        **OPTIONS,
    }


def _empty(q, k, cos, sin, back):
    q = None if q is None else torch.empty_like(q, memory_format=torch.contiguous_format)
    return q, None if k is None else torch.empty_like(k, memory_format=torch.contiguous_format)


def _adjacent(t):
    """t with adjacent channels, and its strides: no copy where they are already."""
    strides = t.stride()
    if strides[-1] == 1 and not t.is_neg():
        return t, strides
    t = t.resolve_neg().contiguous()
    return t, t.stride()


def _turn(
    q: torch.Tensor | None, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, back: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k, contiguous, turned forward or back; one that is absent stays so."""
    out = q_out, k_out = _empty(q, k, cos, sin, back)
    q_heads, k_heads = 0 if q is None else q.shape[1], 0 if k is None else k.shape[1]
    if q is None:  # no program turns it, but its pointer must have a type
        q, q_out = k, k_out
    if k is None:
        k, k_out = q, q_out
    batch, _, n_time, width = q.shape
    q, (q_batch, q_head, q_time, _) = _adjacent(q)
    k, (k_batch, k_head, k_time, _) = _adjacent(k)
    cos, (cos_time, _) = _adjacent(cos)
    sin, (sin_time, _) = _adjacent(sin)
    plan = _plan(width, cos.shape[1], q.dtype, back)
    programs = batch * cdiv(n_time, plan["BLOCK_T"]) * (cdiv(q_heads, HEADS) + cdiv(k_heads, HEADS))
    strides = q_batch, q_head, q_time, k_batch, k_head, k_time, cos_time, sin_time, n_time * width
    launch(_kernel, programs, q, (q, k, cos, sin, q_out, k_out, n_time, q_heads, k_heads, *strides), plan)
    return out


_turn_op = operator("rope", _turn, _empty)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)
        return (_turn_op if torch.compiler.is_compiling() else _turn)(q, k, cos, sin, False)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk):
        dq, dk = (d if need else None for d, need in zip((dq, dk), ctx.needs_input_grad[:2], strict=True))
        if dq is None and dk is None:
            return None, None, None, None
        turn = _turn_op if torch.compiler.is_compiling() else _turn
        out = turn(dq, dk, *ctx.saved_tensors, True)
        return *(t if d is not None else None for t, d in zip(out, (dq, dk), strict=True)), None, None


_eager_rope = eager_apply(_Rope)


def rope(q, k, cos, sin):
    """Turn channel pair (i, i + R/2) of position t by the angle whose cosine and sine are cos[t, i] and sin[t, i].

    q (B, H, T, D), k (B, Hkv, T, D) of any strides, cos and sin (T, R/2), R <= D even -> (q, k) of the same shapes,
    contiguous. The first R channels turn, paired by halves as in Llama; the rest pass unchanged (Su et al. 2021).
    q and k have one dtype; float32 inside (float64 for float64 q), rounded once. cos and sin are constants.
    Moves 2·b bytes an element (b = itemsize), and the tables once for each HEADS heads; the backward the same.
    Deterministic; differentiable once.
    TypeError for dtypes other than the four floating ones, for two of them, and for DTensor; NotImplementedError under
    torch.func; ValueError for shapes that do not fit, tables that require a gradient, or a CPU tensor outside Triton's
    interpreter.
    """
    check(("q", "k", "cos", "sin"), q, k, cos, sin)
    if q.dtype != k.dtype:
        raise TypeError(f"q and k must have one dtype, got {q.dtype} and {k.dtype}; {INSTEAD}")
    q_shape, k_shape, table = q.shape, k.shape, cos.shape
    if len(q_shape) != 4 or len(k_shape) != 4 or q_shape[0] != k_shape[0] or q_shape[2:] != k_shape[2:]:
        raise ValueError(
            f"q (B, H, T, D) and k (B, Hkv, T, D) must agree but for their heads, got {tuple(q_shape)} and "
            f"{tuple(k_shape)}; {INSTEAD}"
        )
    _, _, n_time, width = q_shape
    if len(table) != 2 or table[0] != n_time or not 0 < 2 * table[1] <= width or sin.shape != table:
        raise ValueError(
            f"cos and sin must have shape ({n_time}, R/2) with R from 2 to {width}, got {tuple(table)} and "
            f"{tuple(sin.shape)}; {INSTEAD}"
        )
    if cos.requires_grad or sin.requires_grad:
        raise ValueError(f"cos and sin get no gradient here: detach them; {INSTEAD}")
    return (_Rope.apply if torch.compiler.is_compiling() else _eager_rope)(q, k, cos, sin)
