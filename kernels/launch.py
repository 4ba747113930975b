"""What all kernels share: refusing bad input, launching, and the face that torch.compile sees.

A kernel's module keeps four parts in this order: Triton kernels, launchers, autograd.Function, public functions.
"""

import functools

import torch
import triton
import triton.language as tl

INTERPRETED = not isinstance(tl.sum, triton.JITFunction)
# what a kernel computes in: each load is widened at once, since the interpreter's bfloat16 arithmetic works on raw bits
ACC = {torch.float16: tl.float32, torch.bfloat16: tl.float32, torch.float32: tl.float32, torch.float64: tl.float64}
# no contraction to FMA: an add and a norm round alike whether fused or not, and whichever Triton compiles them
OPTIONS = {"enable_fp_fusion": False}
INSTEAD = "kernels=torch takes PyTorch's own operators instead"
_CPU_PROGRAMS = 2


def launch(kernel, programs, on, *args, **constants):
    """kernel[(programs,)](*args, **constants) where `on` lies; nothing on the meta device, which has no memory."""
    if on.is_cuda:
        if torch.version.hip:
            constants.pop("maxnreg", None)  # an option of NVIDIA's assembler alone
        with torch.cuda.device(on.device):
            kernel[(programs,)](*args, **constants, **OPTIONS)
    elif not on.is_meta:
        kernel[(programs,)](*args, **constants, **OPTIONS)


def cdiv(a, b):
    return -(-a // b)


def multiprocessors(device):
    """How many programs run at once, at the least."""
    return _multiprocessors(device) if device.type == "cuda" else _CPU_PROGRAMS


@functools.cache
def _multiprocessors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count


def rows(t):
    """(..., N) seen as (M, N) with adjacent columns, and the stride of its rows: no copy where the strides allow it."""
    if t.is_contiguous():
        return t, t.shape[-1]
    t = t.reshape(-1, t.shape[-1])
    t = t if t.stride(-1) == 1 else t.contiguous()
    return t, t.stride(0)


def operator(name, implementation, empty):
    """`implementation`, seen by torch.compile as one opaque operator whose outputs are shaped like `empty`'s.

    Eager calls go without the operator, at a fifth of its cost per call.
    """
    opaque = torch.library.custom_op(f"normgpt::{name}", implementation, mutates_args=())
    opaque.register_fake(empty)

    def call(*args):
        return (opaque if torch.compiler.is_compiling() else implementation)(*args)

    return call


def check(**tensors):
    """Refuses tensors that no kernel takes; None is an absent one, and the first one says what the others must fit."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(f"Triton kernels do not take part in torch.func transforms; {INSTEAD}")
    (first_name, first), *_ = tensors.items()
    for name, t in tensors.items():
        if t is None:
            continue
        if t.dtype not in ACC:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {t.dtype}; {INSTEAD}")
        if t.device != first.device:
            raise ValueError(f"{name} is on {t.device} and {first_name} on {first.device}: move one; {INSTEAD}")
        if type(t).__name__ == "DTensor":
            raise TypeError(f"{name} is a DTensor, which no kernel here can shard: pass .to_local(); {INSTEAD}")
    if first.device.type == "cpu" and not INTERPRETED:
        raise ValueError(
            f"{first_name} is on the CPU, where Triton compiles nothing: set TRITON_INTERPRET=1 before starting Python "
            f"to run in Triton's interpreter; {INSTEAD}"
        )
