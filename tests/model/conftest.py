from tests.kernels.conftest import bfloat16_rounds_to_nearest  # noqa: F401
