"""What times whole steps and parts of them: everyone in turn, held against floor, peer and the step without a norm."""

from importlib.util import find_spec

import pytest
import torch

from errors import UserError
from model.config import ModelConfig, NormKind
from scripts import bench_growth, bench_loss, bench_train, contestants
from scripts.bench_train import Options, main
from scripts.contestants import Contestant, matrix_products, peak_mib, shape_of, theirs
from scripts.results import read

SMALL = {"block": 8, "batch": 1, "compile": "eager"}
CPU = torch.device("cpu")


def test_everyone_is_timed_in_turn_and_kept(tmp_path, capsys):
    main(Options(**SMALL, kernels="torch", to=str(tmp_path / "train.json")))
    rows = read(tmp_path / "train.json")
    steps, alone = ([r for r in rows if r["implementation"] == name] for name in ("normgpt", "one norm alone"))
    assert [row["norm"] for row in steps] == [row["norm"] for row in alone] == list(NormKind)
    assert {row["kernels"] for row in steps} == {"torch"}
    assert rows[-1]["implementation"] == "matrix products"
    assert all(row["over_floor"] > 1 and row["peak_mib"] > 0.1 for row in steps)
    assert all(0 < row["ms_p10"] <= row["ms"] <= row["ms_p90"] for row in rows)
    assert all(row["tokens_per_s"] == pytest.approx(8e3 / row["ms"], rel=0.01) for row in steps)
    assert all(row["tokens_per_s"] is row["over_floor"] is row["norm_share"] is None for row in [*alone, rows[-1]])
    assert all(row["mfu"] is None for row in rows)
    said = capsys.readouterr().out
    assert "/ floor" in said
    assert ("without transformers" in said) == (find_spec("transformers") is None)
    bench_train.draw(rows, tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "train.png").read_bytes()


def test_a_step_is_held_against_floor_fastest_peer_and_the_step_without_a_norm():
    def timed(implementation, ms, norm="rmsnorm", kernels="cpu"):
        about = {"implementation": implementation, "norm": norm, "kernels": kernels, "compile": "eager"}
        return Contestant(about, None, [ms * (1 + ms * n % 3 / 1e6) for n in range(100)])

    ours, bare = timed("normgpt", 12.0), timed("normgpt", 9.0, norm="identity")
    others = [timed("normgpt", 1.0, norm="identity", kernels="torch"), timed("one norm alone", 0.5)]
    peers = [timed("transformers 5.0", 20.0, kernels=""), timed("litgpt 1.0", 16.0, kernels="")]
    everyone = [ours, bare, *others, *peers, timed("matrix products", 6.0, norm="", kernels="")]
    row = bench_train.row(ours, everyone, Options(batch=2, block=3), 24.0, 1.5)
    assert row["over_floor"] == pytest.approx(2, abs=1e-3)
    assert row["over_peer"] == pytest.approx(0.75, abs=1e-3)
    assert row["norm_share"] == pytest.approx(0.25, abs=1e-3)
    for key in ("over_floor", "over_peer", "norm_share"):
        assert row[f"{key}_low"] <= row[key] <= row[f"{key}_high"]
    assert (row["tokens_per_s"], row["mfu"], row["peak_mib"]) == (500, pytest.approx(2000), 1.5)
    without_peer = bench_train.row(ours, [ours, everyone[-1]], Options(batch=2, block=3), None, 1.5)
    assert without_peer["over_peer"] is without_peer["norm_share"] is without_peer["mfu"] is None


@pytest.mark.parametrize("peer", contestants.PEERS)
def test_a_peer_has_our_shape(peer):
    pytest.importorskip(peer)
    cfg = ModelConfig(n_layer=2, n_head=2, n_embd=64, block_size=16, vocab_multiple=1)
    model, logits = contestants.PEERS[peer](cfg, 11)
    ours = bench_train.GPT(cfg, 11)
    assert sum(p.numel() for p in model.parameters()) == ours.num_params()
    x, y = contestants.draw_batch(11, 3, 16, CPU)
    assert logits(x).shape == (3, 16, 11)
    theirs(peer, cfg, "eager", x, y, 11).step()


def test_peak_memory_counts_what_a_step_holds_at_once():
    def step():
        a = torch.empty(2**20)  # 4 MiB
        b = torch.empty(2**21)
        del a
        c = torch.empty(2**18)
        del b, c

    step()
    assert peak_mib(step, CPU) == pytest.approx(12, abs=0.1)


def test_everyone_has_a_step_a_round_and_no_fixed_neighbour():
    order = []
    everyone = [Contestant({}, lambda name=name: order.append(name)) for name in "abc"]
    contestants.interleave(everyone, 20, CPU)
    rounds = ["".join(order[at : at + 3]) for at in range(0, len(order), 3)]
    assert len(rounds) == contestants.WARMUP + 20
    assert {"".join(sorted(names)) for names in rounds} == {"abc"}
    assert len(set(rounds)) == 6
    assert [len(one.ms) for one in everyone] == [20] * 3


def test_the_floor_is_the_step_s_products():
    """Two operations for each number multiplied: with the tied head six a weight, and attention's 12 T C a layer."""
    cfg, counted = ModelConfig(n_layer=2, n_head=2, n_embd=64, block_size=16, vocab_multiple=1), []
    whole = torch.matmul

    def matmul(a, b, out):
        counted.append(2 * a.shape[:-1].numel() * a.shape[-1] * b.shape[-1])
        return whole(a, b, out=out)

    step = matrix_products(cfg, 11, 3, CPU).step
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
    cfg = shape_of("shakespeare", 64)
    assert (cfg.n_layer, cfg.n_embd, cfg.block_size, cfg.dropout) == (6, 384, 64, 0.0)


def test_growth_is_told_from_line_to_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_growth, "BASE", bench_growth.BASE | {"n_embd": 32, "n_head": 1, "block": 8, "batch": 1})
    monkeypatch.setattr(
        bench_growth, "AXES", {"tokens": [{"batch": 4}, {"batch": 8}], "depth": [{"n_layer": 1}, {"n_layer": 2}]}
    )
    bench_growth.main(bench_growth.Options(steps=2, to=str(tmp_path / "growth.json")))
    rows = read(tmp_path / "growth.json")
    assert [(r["axis"], r["value"]) for r in rows] == [("tokens", 4), ("tokens", 8), ("depth", 1), ("depth", 2)]
    assert [r["flops_grew"] for r in rows][:3] == [None, 2, None]
    assert rows[1]["ms_grew"] == pytest.approx(rows[1]["ms"] / rows[0]["ms"], abs=0.02)
    assert rows[1]["peak_mib_grew"] == pytest.approx(rows[1]["peak_mib"] / rows[0]["peak_mib"], abs=0.1)
    assert "x2.00" in capsys.readouterr().out


def test_losses_are_timed_beside_that_of_all_logits(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setitem(bench_loss.head_loss.__globals__["AT_ONCE"], "cpu", 32 * 500)
    sizes = {"tokens": 512, "width": 8, "vocab": 500}
    bench_loss.main(bench_loss.Options(**sizes, steps=2, to=str(tmp_path / "loss.json")))
    rows = {row["loss"]: row for row in read(tmp_path / "loss.json")}
    assert rows["all logits"]["ms_of_whole"] == rows["all logits"]["peak_mib_of_whole"] == 1
    assert rows["in chunks (model/loss.py)"]["peak_mib_of_whole"] < 0.2
    assert ("torch's linear_cross_entropy" in rows) == hasattr(torch.nn.functional, "linear_cross_entropy")


@pytest.mark.parametrize(
    ("script", "options"),
    [(bench_growth, {"steps": 0}), (bench_growth, {"compile": "half"}), (bench_loss, {"vocab": 0})],
)
def test_bad_sizes(script, options):
    with pytest.raises(UserError, match="must be at least 1"):
        script.main(script.Options(**options))
