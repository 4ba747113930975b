"""A large run on paper: LLaMA's own count of parameters, and the formula of activations against what is held."""

import pytest
import torch

from errors import UserError
from model.config import ModelConfig, NormConfig
from model.gpt import GPT
from scripts.plan import Options, plan


def value(rows: list[dict], what: str):
    return next(row["value"] for row in rows if row["what"].startswith(what))


def test_llama_7b_has_its_published_parameters_and_a_plausible_plan():
    rows = plan(Options())
    assert value(rows, "parameters") == 6_738_415_616
    n, flops = value(rows, "parameters"), value(rows, "FLOPs a token")
    assert flops == 6 * (n - 32_000 * 4096) + 12 * 32 * 4096 * 4096 - 6 * 4096 * 65  # gains count nothing
    assert value(rows, "the run") == pytest.approx(flops * 1e12 / (64 * 989e12 * 0.4) / 86_400)
    parts = [row["value"] for row in rows if row["unit"] == "GiB"][:8]
    assert value(rows, "all that") == pytest.approx(sum(parts))
    assert value(rows, "weights") == pytest.approx(4 * n / 64 / 2**30)


def test_hsdp_holds_more_and_sends_as_much_within_a_machine():
    whole, machine = plan(Options()), plan(Options(shard=8))
    assert value(machine, "AdamW") == pytest.approx(8 * value(whole, "AdamW"))
    assert value(machine, "sent") == pytest.approx(value(whole, "sent") * (7 / 8) / (63 / 64))


def test_what_a_block_begins_with_is_what_is_held():
    """Under activation checkpointing and bfloat16, the stream in float32 and the last branch in bfloat16."""
    held = {}
    for n_layer in (2, 6):
        cfg = ModelConfig(
            norm=NormConfig(), n_layer=n_layer, n_head=2, n_embd=32, block_size=16, activation_checkpointing=True
        )
        model, tokens, storages = GPT(cfg, 11), torch.zeros(3, 16, dtype=torch.int64), {}

        def hold(t, storages=storages):
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(hold, lambda t: t), torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens, tokens)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        held[n_layer] = sum(size for at, size in storages.items() if at not in weights)
        assert loss.isfinite()
    assert (held[6] - held[2]) / 4 == pytest.approx(6 * 3 * 16 * 32, rel=0.05)


def test_micro_batches_hold_whole_gradients():
    one, four = plan(Options(accumulate=1, batch=256)), plan(Options(accumulate=4))
    more = value(four, "all that") - value(one, "all that")
    assert more == pytest.approx(4 * 6_738_415_616 / 2**30)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(gpu="H100"), "NVIDIA H100"),
        (Options(shard=48), "shard=48 must divide"),
        (Options(batch=100), "multiple of gpus x accumulate = 256"),
        (Options(mfu=45), "must lie in"),
        (Options(gpus=0), "gpus=0 must be at least 1"),
        (Options(tokens=-1), "tokens=-1 must be at least 1"),
        (Options(model="llama"), "near names: llama_7b"),
    ],
)
def test_what_cannot_be_planned_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        plan(options)
