"""What all kernels share: refusing bad input, launching, and the face that torch.compile sees.

A kernel's module keeps four parts in this order: Triton kernels, launchers, autograd.Function, public functions.
"""

import functools

import torch
import triton
import triton.language as tl

from kernels.eager import PLAIN

INTERPRETED = not isinstance(tl.sum, triton.JITFunction)
# what a kernel computes in: each load is widened at once, since the interpreter's bfloat16 arithmetic works on raw bits
ACC = {torch.float16: tl.float32, torch.bfloat16: tl.float32, torch.float32: tl.float32, torch.float64: tl.float64}
WIDE = {dtype: torch.promote_types(dtype, torch.float32) for dtype in ACC}
# part of every launch: without contraction to FMA an add and a norm of one dtype round alike, fused or not, whichever
# Triton compiles them
OPTIONS = {"enable_fp_fusion": False}
MAX_COLS = 2**30  # columns are int32
INSTEAD = "kernels=torch takes PyTorch's own operators instead"
_CPU_PROGRAMS = 2


def launch(kernel, programs, on, args, constants):
    """kernel[(programs,)](*args, **constants) where `on` lies; nothing on the meta device, which has no memory."""
    if on.is_cuda:
        if torch.version.hip:
            constants = for_amd(constants, _properties(on.device).warp_size)
        with torch.cuda.device(on.device):
            kernel[(programs,)](*args, **constants)
    elif not on.is_meta:
        kernel[(programs,)](*args, **constants)


def for_amd(constants, warp_size):
    """The same threads in warps of another size; maxnreg is an option of NVIDIA's assembler alone."""
    kept = {name: value for name, value in constants.items() if name != "maxnreg"}
    return kept | {"num_warps": constants["num_warps"] * 32 // warp_size}


def cdiv(a, b):
    return -(-a // b)


def multiprocessors(device):
    """How many programs run at once, at the least."""
    return _properties(device).multi_processor_count if device.type == "cuda" else _CPU_PROGRAMS


@functools.cache
def _properties(device):
    return torch.cuda.get_device_properties(device)


def rows(t):
    """(..., N) seen as (M, N) with adjacent columns, and the stride of its rows: no copy where the strides allow it."""
    if t.is_contiguous() and not t.is_neg():
        return t, t.shape[-1]
    t = t.resolve_neg().reshape(-1, t.shape[-1])
    t = t if t.stride(-1) == 1 else t.contiguous()
    return t, t.stride(0)


def operator(name, implementation, empty):
    """`implementation` as one opaque operator for torch.compile, whose outputs are shaped like `empty`'s.

    An output that is None, since nobody asked for it, becomes a tensor of no elements: operators return tensors alone.
    Eager calls go to `implementation` itself, at a fraction of the cost.
    """

    def whole(function):
        @functools.wraps(implementation)
        def outputs(*args):
            out = function(*args)
            some = out if isinstance(out, torch.Tensor) else next(t for t in out if t is not None)
            return out if some is out else tuple(some.new_empty(0) if t is None else t for t in out)

        return outputs

    opaque = torch.library.custom_op(f"normgpt::{name}", whole(implementation), mutates_args=())
    opaque.register_fake(whole(empty))
    return opaque


def check(names, *tensors):
    """Refuses tensors that no kernel takes; None is an absent one, and the first says where the others must lie."""
    device = tensors[0].device
    for t in tensors:
        if t is not None and (t.dtype not in ACC or t.device != device or t.__class__ not in PLAIN):
            _refuse(names, tensors)
    if not INTERPRETED and device.type == "cpu":
        raise ValueError(
            f"{names[0]} is on the CPU, where Triton compiles nothing: set TRITON_INTERPRET=1 before starting Python "
            f"to run in Triton's interpreter; {INSTEAD}"
        )
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(f"Triton kernels do not take part in torch.func transforms; {INSTEAD}")


def _refuse(names, tensors):
    for name, t in zip(names, tensors, strict=True):
        if t is None:
            continue
        if t.dtype not in ACC:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {t.dtype}; {INSTEAD}")
        if t.device != tensors[0].device:
            where = f"{name} is on {t.device} and {names[0]} on {tensors[0].device}"
            raise ValueError(f"{where}: move one to the other; {INSTEAD}")
        if t.__class__.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            what = f"{name} is a {t.__class__.__name__}, which has no memory of its own for a kernel to read"
            raise TypeError(f"{what}: pass a plain tensor, as by .to_local(); {INSTEAD}")
