import os
from pathlib import Path

import pytest


@pytest.fixture
def tinyshakespeare() -> Path:
    beside_the_repository = Path(__file__).parents[3] / "shared/data/tinyshakespeare.txt"
    path = Path(os.environ.get("TINYSHAKESPEARE", beside_the_repository))
    if not path.exists():
        pytest.skip("tinyshakespeare.txt is absent; name it in the environment variable TINYSHAKESPEARE")
    return path
