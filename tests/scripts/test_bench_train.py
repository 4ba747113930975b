"""Whole steps timed beside their floor: all of them, and the floor the step's products."""

from importlib.util import find_spec

import pytest
import torch

from errors import UserError
from model.config import ModelConfig, NormKind
from scripts import bench_train
from scripts.bench_train import Options, main, matrix_products, shape_of
from scripts.results import read

SMALL = {"block": 8, "batch": 1, "compile": "eager"}


def test_everyone_is_timed_in_turn_and_kept(tmp_path, capsys):
    main(Options(**SMALL, kernels="torch", to=str(tmp_path / "train.json")))
    rows = read(tmp_path / "train.json")
    ours = [row for row in rows if row["implementation"] == "normgpt"]
    assert [row["norm"] for row in ours] == list(NormKind)
    assert {row["kernels"] for row in ours} == {"torch"}
    assert rows[-1]["implementation"] == "matrix products"
    assert rows[-1]["over_floor"] == 1
    assert all(row["over_floor"] > 1 for row in rows[:-1])
    assert all(0 < row["ms_p10"] <= row["ms"] <= row["ms_p90"] for row in rows)
    assert all(row["tokens_per_s"] == pytest.approx(8e3 / row["ms"], rel=0.01) for row in rows)
    assert all(row["mfu"] is None for row in rows)
    said = capsys.readouterr().out
    assert "over the floor" in said
    assert ("without transformers" in said) == (find_spec("transformers") is None)


def test_neither_order_nor_drift_favours_any():
    order = []
    everyone = [bench_train.Contestant({}, lambda name=name: order.append(name)) for name in "abc"]
    bench_train.interleave(everyone, 3, torch.device("cpu"))
    assert "".join(order) == "abccba" * 4
    assert [len(one.ms) for one in everyone] == [3] * 3


def test_the_floor_is_the_step_s_products():
    """Two operations for each number multiplied: with the tied head six a weight, and attention's 12 T C a layer."""
    cfg, counted = ModelConfig(n_layer=2, n_head=2, n_embd=64, block_size=16), []
    whole = torch.matmul

    def matmul(a, b, out):
        counted.append(2 * a.shape[:-1].numel() * a.shape[-1] * b.shape[-1])
        return whole(a, b, out=out)

    step = matrix_products(cfg, 11, 3, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "matmul", matmul)
        step()
    model = bench_train.GPT(cfg, 11)
    assert sum(counted) == 3 * 16 * model.flops_per_token()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "tinny"}, "there is no model 'tinny'; .*tiny"),
        ({"norm": "rmsnom"}, "norm=rmsnom is not to be had here; .*rmsnorm"),
        ({"kernels": "triton"}, "kernels=triton is not to be had here"),
        ({"compile": "half"}, "compile=half is not to be had here"),
        ({"peers": "llama"}, "peers=llama is not to be had here"),
        ({"steps": 20}, "steps=20 must be at least 100"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(UserError, match=message):
        main(Options(**SMALL | options))


def test_the_shape_is_that_of_the_yaml():
    cfg = shape_of(Options(model="shakespeare", block=64))
    assert (cfg.n_layer, cfg.n_embd, cfg.block_size, cfg.dropout) == (6, 384, 64, 0.0)
