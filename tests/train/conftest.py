import pytest


@pytest.fixture
def overrides(tmp_path, text_file) -> list[str]:
    return [
        "data=text", f"data.path={text_file}", f"data.cache_dir={tmp_path}/tokens",
        f"runs_dir={tmp_path}/runs", "name=run", "norm=rmsnorm", "against=layernorm",
        "device=cpu", "model.n_layer=1", "model.n_embd=16", "model.n_head=1", "model.block_size=16",
        "train.batch_size=2", "train.eval_tokens=64", "train.sample_chars=0", "train.log_every=1", "train.steps=3000",
        "compare.report=false",
    ]  # fmt: skip
