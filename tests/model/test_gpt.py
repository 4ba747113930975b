"""Shapes, causality, initial weights, placement, and the count of parameters and FLOPs."""

import copy
import math
import pickle

import pytest
import torch

from errors import UserError
from model.config import Kernels, ModelConfig, NormConfig, NormKind, Placement
from model.gpt import GPT
from model.init import init_std
from model.rope import rope_table
from tests.model.test_norm import BACKENDS

SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 8, "vocab_multiple": 1}


def build(seed: int = 1, kernels: Kernels = Kernels.torch, vocab_size: int = 11, **options) -> GPT:
    norm = NormConfig(kind=options.pop("norm", NormKind.rmsnorm))
    return GPT(ModelConfig(norm=norm, **SMALL | options), vocab_size, kernels=kernels, seed=seed)


def tokens(B: int = 3, T: int = 8) -> torch.Tensor:
    return torch.randint(11, (B, T), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("norm", NormKind)
@pytest.mark.parametrize("placement", Placement)
def test_no_token_sees_a_later_one(norm, placement):
    model = build(norm=norm, placement=placement).eval()
    x = tokens()
    changed = x.clone()
    changed[:, 5] = (x[:, 5] + 1) % 11
    a, b = model(x), model(changed)
    assert a.shape == (3, 8, 11)
    assert torch.equal(a[:, :5], b[:, :5])
    assert not torch.allclose(a[:, 5:], b[:, 5:])


def test_padding_has_no_part_in_loss_logits_or_gradient():
    model, x = build(vocab_multiple=64), tokens()
    assert (model.vocab_size, model(x).shape[-1]) == (64, 11)
    with torch.no_grad():
        model.head.weight[11:] = 9.0
    loss = model(x, x)
    assert loss.item() == pytest.approx(torch.nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).item())
    loss.backward()
    assert not model.head.weight.grad[11:].any()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("placement", Placement)
def test_documents_do_not_see_each_other(placement, checkpointing):
    """Each document's logits are those that it has alone; what stands before the first separator is one too."""
    end, options = 10, {"placement": placement, "activation_checkpointing": checkpointing}
    norm = NormConfig(kind=NormKind.rmsnorm)
    model = GPT(ModelConfig(norm=norm, **SMALL | options), 11, seed=1, separator=end)
    plain = GPT(ModelConfig(norm=norm, **SMALL | options), 11, seed=1)
    x = torch.tensor([[3, 1, end, 4, 5, end, 9, 2], [end, 6, 5, 3, 5, 8, 9, end], [1, 2, 3, 4, 5, 6, 7, 8]])
    borders = [(0, 0, 2), (0, 2, 5), (0, 5, 8), (1, 0, 7), (1, 7, 8), (2, 0, 8)]
    masked = model(x)
    for row, begin, stop in borders:
        alone = plain(x[row : row + 1, begin:stop])
        torch.testing.assert_close(masked[row : row + 1, begin:stop], alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(masked[0, 5:], plain(x)[0, 5:], rtol=0, atol=1e-4)
    torch.testing.assert_close(masked[2], plain(x)[2], rtol=1e-4, atol=1e-5)


def test_variants_share_every_common_initial_weight_bit_for_bit():
    models = [build(norm=n, placement=p, bias=b) for n in NormKind for p in Placement for b in (False, True)]
    weights = [dict(m.named_parameters()) for m in models]
    common = set.intersection(*(set(w) for w in weights))
    assert "blocks.1.mlp.down.weight" in common
    for name in common:
        assert all(torch.equal(w[name], weights[0][name]) for w in weights)


def test_init_is_keyed_by_seed_and_name():
    a, b, other = build(1), build(1), build(2)
    assert torch.equal(a.blocks[0].mlp.down.weight, b.blocks[0].mlp.down.weight)
    assert not torch.equal(a.blocks[0].mlp.down.weight, other.blocks[0].mlp.down.weight)
    assert not torch.equal(a.blocks[0].attention.out.weight, a.blocks[1].attention.out.weight)


def test_init_does_not_depend_on_the_global_generator():
    torch.manual_seed(5)
    a = build()
    torch.manual_seed(6)
    assert torch.equal(a.embedding.weight, build().embedding.weight)


def test_init_scale():
    model = build(n_embd=256, n_head=4)
    std = {name: p.std().item() for name, p in model.named_parameters()}
    assert std["embedding.weight"] == pytest.approx(0.02, rel=0.05)
    assert std["blocks.0.mlp.gate_up.weight"] == pytest.approx(0.02, rel=0.05)
    assert std["blocks.0.mlp.down.weight"] == pytest.approx(0.02 / math.sqrt(4), rel=0.05)
    assert init_std("blocks.0.attention.out.weight", 8) == 0.02 / 4


def test_initial_loss_is_that_of_guessing():
    loss = build(vocab_size=11)(tokens(), (tokens() + 1) % 11)
    assert loss.item() == pytest.approx(math.log(11), rel=0.05)


def test_ignored_targets_do_not_count():
    model, x = build(), tokens()
    y = x.clone()
    y[:, 4:] = -100
    kept = torch.nn.functional.cross_entropy(model(x)[:, :4].flatten(0, 1), y[:, :4].flatten())
    assert model(x, y).item() == pytest.approx(kept.item(), rel=1e-6)


def test_post_placement_normalises_the_stream():
    model = build(placement=Placement.post)
    seen = []
    model.blocks[-1].register_forward_hook(lambda _, __, out: seen.append(out))
    model(tokens())
    stream, branch = seen[0]
    assert branch is None
    assert torch.allclose(stream.square().mean(-1), torch.ones(3, 8), atol=1e-2)
    assert model.final_norm is None


def test_counts():
    model = build(vocab_size=11, vocab_multiple=8)
    hidden, C = 64, 16
    assert model.vocab_size == 16
    matrices = 2 * (C * 3 * C + C * C + C * 2 * hidden + hidden * C)
    assert model.num_params() == matrices + 16 * C + 5 * C  # embedding, and five gains
    assert model.flops_per_token() == 6 * (matrices + 16 * C) + 12 * 2 * C * 8
    untied = build(vocab_size=11, vocab_multiple=8, tie_embeddings=False)
    assert untied.num_params() == model.num_params() + 16 * C
    assert untied.flops_per_token() == model.flops_per_token()


def test_backends_agree():
    x = tokens()
    for norm in NormKind:
        losses = [build(kernels=kernels, norm=norm)(x, x).item() for kernels in BACKENDS]
        assert losses == pytest.approx([losses[0]] * len(losses), abs=1e-6)


def step_by_step(model, x):
    """Logits by x = x + layer(norm(x)), each add apart from the norm after it; or by x = norm(x + layer(x))."""
    T = x.shape[1]
    x = model.embedding(x)
    for block in model.blocks:
        attend = lambda y: block.attention(y, model.cos[:T], model.sin[:T])  # noqa: B023, E731
        for norm, layer in ((block.attention_norm, attend), (block.mlp_norm, block.mlp)):
            x = norm(x + layer(x))[0] if model.final_norm is None else x + layer(norm(x)[0])
    return model.head(x if model.final_norm is None else model.final_norm(x)[0])


@pytest.mark.parametrize(
    ("kernels", "autocast"),  # C is for float32 alone
    [(kernels, autocast) for kernels in BACKENDS for autocast in (False, True)][:-1],
)
@pytest.mark.parametrize("placement", Placement)
@pytest.mark.parametrize("norm", NormKind)
@pytest.mark.usefixtures("bfloat16_rounds_to_nearest")
def test_adding_in_the_norm_changes_no_bit(norm, placement, kernels, autocast):
    model, x, results = build(norm=norm, placement=placement, kernels=kernels, bias=True), tokens(), []
    for forward in (model, lambda x: step_by_step(model, x)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = forward(x)
        model.zero_grad()
        logits.float().square().mean().backward()
        results.append([logits, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_model_can_be_copied_and_pickled():
    model, x = build(kernels=Kernels.triton), tokens()
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(x), model(x))


def test_generation_is_seeded_and_stays_in_the_vocabulary():
    model = build(vocab_size=11, vocab_multiple=64).eval()
    draws = [model.generate(tokens(2, 1), 20, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    assert draws[0].shape == (2, 21)
    assert torch.equal(*draws)
    assert draws[0].max() < 11


def test_rope_table():
    cos, sin = rope_table(16, 8)
    assert cos.shape == sin.shape == (16, 4)
    assert torch.allclose(cos[3, 1], torch.tensor(math.cos(3 * 10_000 ** (-2 / 8))))
    assert torch.allclose(sin[3, 1], torch.tensor(math.sin(3 * 10_000 ** (-2 / 8))))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"n_embd": 130, "n_head": 4}, "the nearest is 128"),
        ({"n_embd": 12, "n_head": 4}, "n_embd=16 would"),
        ({"n_layer": 0}, "n_layer"),
        ({"dropout": 1.0}, "dropout"),
        ({"n_hidden": -5}, "n_hidden"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"norm": NormConfig(eps=0.0)}, "eps"),
    ],
)
def test_impossible_sizes_are_refused(options, match):
    with pytest.raises(UserError, match=match):
        ModelConfig(**options)


@pytest.mark.parametrize("norm", NormKind)
def test_triton_kernels_do_not_break_the_graph(norm):
    model, x = build(kernels=Kernels.triton, norm=norm, n_layer=1, bias=True), tokens()
    model(x, x).backward()
    eager = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    torch.compile(model, fullgraph=True, backend="aot_eager")(x, x).backward()
    for name, p in model.named_parameters():
        assert torch.allclose(p.grad, eager[name], atol=1e-6), name
    torch.compiler.reset()


def test_activation_checkpointing_changes_what_is_held_and_nothing_else():
    gradients, held = [], []
    for again in (False, True):
        model = build(activation_checkpointing=again, dropout=0.1, n_layer=6)
        storages = {}

        def hold(t, storages=storages):
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(hold, lambda t: t):
            loss = model(tokens(8), tokens(8))
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
        held.append(sum(storages.values()) - sum(p.nbytes for p in model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert held[1] < held[0] / 3
