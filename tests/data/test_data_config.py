import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from data.config import DataConfig, Source, Tokenizer
from errors import UserError


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_val_fraction_outside_the_open_interval_is_refused(fraction):
    with pytest.raises(UserError, match=r"data\.val_fraction=.*between 0 and 1"):
        DataConfig(val_fraction=fraction)


def test_works_as_a_structured_config():
    schema = OmegaConf.structured(DataConfig)
    cfg = OmegaConf.to_object(OmegaConf.merge(schema, {"source": "text", "path": "a.txt", "tokenizer": "char"}))
    assert cfg == DataConfig(source=Source.text, path="a.txt", tokenizer=Tokenizer.char)


def test_importing_the_package_loads_nothing_heavy():
    modules = "data.config, data.sources, data.tokenizers, data.tokens, data.loader"
    heavy = "{'torch', 'datasets', 'tiktoken', 'requests', 'aiohttp'}"
    code = f"import sys, {modules}; sys.exit(str({heavy} & set(sys.modules)) if {heavy} & set(sys.modules) else 0)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
