import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def strict_torch():
    """Fresh memory holds NaN, so that an output left unwritten shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.fixture(scope="session")
def bfloat16_rounds_to_nearest():
    """Triton's interpreter truncates float32 to bfloat16; let it round to nearest even, as the GPU does."""
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    truncating = interpreter._convert_float

    def rounding(x, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return truncating(x, source, target, mode)
        bits = np.ascontiguousarray(x).view(np.uint32)
        nearest = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
        return np.where(np.isnan(x), np.uint16(0x7FC0), nearest).reshape(x.shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", rounding)
        yield
