"""The transformer goes on from a cache: logits of every kind are those of the whole text."""

import pytest
import torch
from test_transformer import GPT2, config

from nanotrain_core.batch import Batch
from nanotrain_core.builtin.transformer_config import RopeScalingConfig
from nanotrain_core.contracts import caches_context
from nanotrain_core.models.cache import Cache
from nanotrain_core.models.ops import TORCH_OPS
from nanotrain_core.models.transformer import Transformer
from nanotrain_core.pipeline.actions import Part

KINDS = {
    "gpt2": GPT2,
    "gqa": {"kv_heads": 2},
    "mqa": {"kv_heads": 1, "head_size": 6, "tied": True},
    "qwen": {"kv_heads": 2, "qk_norm": True, "attention_bias": True, "output_bias": False},
    **{
        kind: {"kv_heads": 2, "rope_scaling": RopeScalingConfig(type=kind, original_length=6)}
        for kind in ("llama3", "yarn", "linear")
    },
}


def whole(**changes):
    """Return a model with random weights in float64."""
    model = Transformer(config(**changes))
    part = model.build(Part.whole(model.layers)).to_empty(device="cpu").double().eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in part.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return part


def tokens_of(length):
    return torch.randint(23, (2, length), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def in_passes(part, tokens, lengths, cache):
    found = []
    for length in lengths:
        new = tokens[:, cache.start : cache.start + length]
        found.append(part(new, Batch(new, cache=cache)).value)
        cache.advance(length)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(1,) * 13, (7, 1, 1, 3, 1), (13,)], ids=str)
def test_logits_are_those_of_the_whole_text(kind, lengths):
    part, tokens = whole(**KINDS[kind]), tokens_of(13)
    with torch.no_grad():
        expected = part(tokens, Batch(tokens)).value
    found = in_passes(part, tokens, lengths, Cache(13))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_token_takes_keys_and_values_of_its_own_heads_alone():
    """2 tensors of 3 layers, 2 heads of 8 numbers of 8 bytes."""
    cache = Cache(4)
    in_passes(whole(kv_heads=2), tokens_of(2), (2,), cache)
    assert cache.bytes_per_token == 2 * 3 * 2 * 8 * 8


def test_angles_that_depend_on_the_length_allow_no_cache():
    scaling = RopeScalingConfig(type="dynamic", original_length=6)
    assert not caches_context(Transformer(config(rope_scaling=scaling)))
    assert caches_context(Transformer(config()))


def test_more_tokens_than_it_was_made_for_are_refused():
    cache = Cache(3)
    in_passes(whole(), tokens_of(4), (3,), cache)
    with pytest.raises(ValueError, match="a cache for 3 tokens was given 4"):
        in_passes(whole(), tokens_of(4)[:, :1].repeat(1, 4), (1,), cache)


def test_positions_that_the_model_has_not_are_refused():
    cache = Cache(20)
    part = whole(**GPT2)
    in_passes(part, tokens_of(16), (16,), cache)
    with pytest.raises(ValueError, match="a sequence of 17 tokens exceeds the model's max_length = 16"):
        in_passes(part, tokens_of(17), (1,), cache)


@pytest.mark.parametrize("queries", [1, 3, 7])
def test_queries_are_those_of_the_last_tokens(queries):
    """Against softmax in plain einsum, with a mask that leaves out later tokens."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(2, n, h, 5, dtype=torch.float64, generator=generator)
        for n, h in ((queries, 6), (7, 2), (7, 2))
    )
    later = torch.arange(7) > torch.arange(7 - queries, 7).unsqueeze(1)
    scores = torch.einsum("bshk,bthk->bhst", q, k.repeat_interleave(3, 2)) * 5**-0.5
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    expected = torch.einsum("bhst,bthk->bshk", weights, v.repeat_interleave(3, 2))
    torch.testing.assert_close(TORCH_OPS.attention(q, k, v), expected, rtol=0, atol=1e-12)
