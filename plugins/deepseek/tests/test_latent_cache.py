"""Of a token a layer keeps the latent and the rotary key: logits are those of the whole text."""

import pytest
import torch
from nanotrain_deepseek.config import DeepSeekConfig, YarnConfig
from nanotrain_deepseek.model import DeepSeek
from nanotrain_deepseek.samples import V2, V3

from nanotrain_core.batch import Batch
from nanotrain_core.models.cache import Cache
from nanotrain_core.pipeline.actions import Part

KINDS = {"v3": V3, "v2": {**V2, "yarn": YarnConfig(original_length=8)}, "queries from x": {**V3, "q_rank": 0}}


def whole(table):
    model = DeepSeek(DeepSeekConfig(**table))
    part = model.build(Part.whole(model.layers)).to_empty(device="cpu").double().eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in part.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return part


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_whole_text(kind):
    part = whole(KINDS[kind])
    tokens = torch.randint(64, (2, 14), generator=torch.Generator().manual_seed(2))
    cache, found = Cache(14), []
    with torch.no_grad():
        expected = part(tokens, Batch(tokens)).value
        for count in (6, 4, 1, 1, 1, 1):
            new = tokens[:, cache.start : cache.start + count]
            found.append(part(new, Batch(new, cache=cache)).value)
            cache.advance(count)
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_token_takes_the_latent_and_the_rotary_key_of_each_layer(dtype):
    """8 + 4 numbers in 3 layers: keys and values of 4 heads would be 4 x (12 + 6)."""
    part, cache = whole(V3).to(dtype), Cache(5)
    tokens = torch.arange(5).unsqueeze(0)
    with torch.no_grad():
        part(tokens, Batch(tokens, cache=cache))
    assert cache.bytes_per_token == 3 * (V3["kv_rank"] + V3["rope_size"]) * dtype.itemsize
