"""Further tokens: what is predicted from what, the count of targets, and what is left out elsewhere."""

import pytest
import torch
import torch.nn.functional as F
from nanotrain_deepseek.config import DeepSeekConfig
from nanotrain_deepseek.model import DeepSeek
from nanotrain_deepseek.samples import V3
from nanotrain_deepseek.yarn import rotation

from nanotrain_core.batch import IGNORE, Batch
from nanotrain_core.layout.initialization import materialize
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.placement import place
from nanotrain_core.pipeline.actions import Part, parts_between

CONFIG = DeepSeekConfig(**V3)
ONE_RANK = Layout({"dense": View(("dp",), (1,))})


def built(*parts, config=CONFIG):
    """Build parts of the model in float64."""
    model = DeepSeek(config)
    made = [model.build(part).double() for part in parts or [Part.whole(config.layers)]]
    materialize(made, place(made, ONE_RANK), 5, torch.device("cpu"))
    return model, made


def batch_of(ignored=()):
    tokens = torch.randint(64, (2, 11), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].clone()
    for position in ignored:
        targets[position] = IGNORE
    return Batch(tokens[:, :-1].clone(), targets)


def chain(part, batch, depth):
    """Return the logits at a depth of all positions that have a token to predict."""
    length = batch.tokens.shape[1]
    h = part.embed(batch.tokens)
    turn = rotation(length, CONFIG, like=h)
    for layer in part.layers.values():
        h, _ = layer(h, turn)
    h = part.norm(h)
    for k in range(1, depth + 1):
        module = part.mtp[k - 1]
        known = length - k  # positions whose token k steps on is in the batch
        joined = torch.cat(
            (module.hidden_norm(h[:, :known]), module.embed_norm(part.embed(batch.tokens[:, k:]))), -1
        )
        short = rotation(known, CONFIG, like=h)
        h, _ = module.block(module.proj(joined), short)
        h = module.norm(h)
    return h @ part.head.weight.T


def test_loss_is_the_sum_of_cross_entropies_of_tokens_two_and_three_on():
    _, (part,) = built()
    for norm in (part.norm, *(module.norm for module in part.mtp)):  # with ones another norm undoes it
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    batch = batch_of(ignored=[(0, 3), (1, slice(6, 10))])
    expected = 0.0
    for depth in (1, 2):
        logits = chain(part, batch, depth)
        targets = batch.targets[:, depth:]
        expected += F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
        ).item()
    assert part(batch.tokens, batch).losses["mtp"].item() == pytest.approx(expected, abs=1e-8)


def test_count_is_the_number_of_targets_of_all_depths():
    batch = batch_of(ignored=[(0, 3), (1, slice(6, 10))])
    valid = sum(
        int(batch.targets[b, i + k] != IGNORE)
        for k in (1, 2)
        for b in range(2)
        for i in range(10)
        if i + k < 10
    )
    assert valid == 24
    assert DeepSeek(CONFIG).loss_counts(batch)["mtp"] == valid


def test_a_module_never_sees_the_token_it_predicts():
    _, (part,) = built()
    batch, seen = batch_of(), []
    part.head.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    part(batch.tokens, batch)
    batch.tokens[:, 7] = (batch.tokens[:, 7] + 1) % 64
    part(batch.tokens, batch)
    for depth, (before, after) in enumerate(zip(seen[:3], seen[3:], strict=True)):
        moved = (after - before).abs().amax((0, 2))
        first = 7 - depth  # the module of a depth reads that many tokens ahead, and predicts the one after
        assert (moved[:first] < 1e-12).all()
        assert moved[first] > 1e-3


def test_released_order_swaps_the_halves_of_the_projection():
    _, (paper,) = built()
    _, (released,) = built(config=DeepSeekConfig(**V3 | {"mtp_input": "embedding_first"}))
    for module in released.mtp:
        module.proj.weight.data = module.proj.weight.data.roll(CONFIG.width, dims=1)
    batch = batch_of()
    losses = [part(batch.tokens, batch).losses["mtp"].item() for part in (paper, released)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)


def test_last_part_holds_the_table_under_the_first_one_s_name():
    _, (first, last) = built(*parts_between([0, 1, 3], [0, 1]))
    assert torch.equal(first.embed.weight, last.embed.weight)
    assert not hasattr(first, "mtp")
    batch = batch_of()
    losses = last(first(batch.tokens, batch).value, batch).losses
    assert losses["mtp"].item() == pytest.approx(chain_loss(batch), abs=1e-8)


def chain_loss(batch):
    _, (part,) = built()
    return part(batch.tokens, batch).losses["mtp"].item()


def test_evaluation_predicts_the_next_token_only():
    _, (part,) = built()
    batch = batch_of()
    assert set(part.eval()(batch.tokens, batch).losses) == {"lm"}
    assert part(batch.tokens, Batch(batch.tokens)).value.shape == (2, 10, 64)
