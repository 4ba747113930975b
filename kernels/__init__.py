"""Fused Triton kernels. `reference` holds the plain twin of each, with the same name and signature.

Nothing heavy is imported until a kernel is asked for, and `from kernels import reference` works without Triton.
"""

from importlib import import_module

_HOME = {
    **dict.fromkeys(("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"), "kernels.norm"),
    "swiglu": "kernels.glu",
    "rope": "kernels.rotary",
}

__all__ = sorted(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(_HOME[name])
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "triton":
            raise
        message = f"kernels.{name} needs Triton, which is not installed: choose kernels=torch, or pip install triton"
        raise ImportError(message) from missing
    globals()[name] = getattr(module, name)
    return globals()[name]
