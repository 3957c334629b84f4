"""Parameters and operations of the released models, as computed from their published dimensions."""

from pathlib import Path

import pytest
import torch
import transformers
from nanotrain_moe_transformer.config import MoETransformerConfig
from nanotrain_moe_transformer.hf_names import names
from nanotrain_moe_transformer.model import MoETransformer

from nanotrain_core.pipeline.actions import Part
from nanotrain_core.recipe.source import find_recipe
from nanotrain_core.recipe.structure import structure


def fragment(name, **changes):
    """Build the model of a shipped fragment, with some keys changed."""
    import tomli

    table = tomli.loads(Path(find_recipe(f"fragments/{name}")).read_text())["model"]
    del table["use"]
    config, problems = structure(table | changes, MoETransformerConfig, "model")
    assert not problems
    return MoETransformer(config)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("qwen3_30b_a3b", 30_532_122_624, "3.35"), ("mixtral_8x7b", 46_702_792_704, "12.88")],
)
def test_parameters_are_those_of_the_released_model(name, total, active):
    """Qwen3: 30.5B, 3.3B of them active; Mixtral: 46.7B and 12.9B."""
    model = fragment(name)
    counts = {n: p.numel() for n, p in model.build(Part.whole(model.layers)).named_parameters()}
    assert sum(counts.values()) == total
    routed = sum(count for n, count in counts.items() if ".experts." in n)
    share = model.config.top_k / model.config.experts
    assert f"{(total - routed * (1 - share)) / 1e9:.2f}" == active


def test_qwen2_moe_has_the_parameters_of_transformers_class():
    """Its defaults are those of Qwen1.5-MoE-A2.7B: 14.3B parameters."""
    hf = transformers.Qwen2MoeConfig()
    with torch.device("meta"):
        theirs = sum(p.numel() for p in transformers.Qwen2MoeForCausalLM(hf).parameters())
    config = MoETransformerConfig(**names.table(hf.to_dict(), ()) | {"mlp_only_layers": ()})
    model = MoETransformer(config)
    ours = {n: p.numel() for n, p in model.build(Part.whole(model.layers)).named_parameters()}
    assert sum(ours.values()) == theirs
    assert f"{theirs / 1e9:.1f}" == "14.3"
    attention = 24 * 4 * 2048**2
    weights = attention + 24 * (2048 * (3 * 1408 * 4 + 60) + 2048 * (3 * 5632 + 1)) + 151936 * 2048
    assert model.flops(0).total == pytest.approx(6 * weights, rel=1e-12)


def test_operations_are_six_for_each_active_weight_without_the_embedding():
    """Attention's scores and values come on top: 2 FLOPs for each of half a sequence, three times."""
    model = fragment("qwen3_30b_a3b")
    attention = 48 * (2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128)
    weights = attention + 48 * (8 * 3 * 2048 * 768 + 2048 * 128) + 151936 * 2048
    assert model.flops(0).total == pytest.approx(6 * weights, rel=1e-12)
    more = model.flops(4096).total - model.flops(0).total
    assert more == pytest.approx(3 * 48 * 4096 * 32 * 2 * 128, rel=1e-12)


def test_dense_layers_have_their_own_costs():
    model = fragment("qwen3_30b_a3b", mlp_only_layers=[1], decoder_sparse_step=2, ffn=6144)
    costs = model.flops(4096).layers
    dense, moe = costs[0], costs[3]  # every second layer, but for layer 1
    assert costs == (dense,) * 3 + (moe, dense) * 22 + (moe,)
    assert dense - moe == pytest.approx(6 * 2048 * (3 * 6144 - 3 * 768 * 8 - 128), rel=1e-12)
