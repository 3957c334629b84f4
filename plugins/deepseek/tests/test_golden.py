"""Parameters and operations of the released models, as computed from their published dimensions."""

from pathlib import Path

import pytest
from nanotrain_deepseek.config import DeepSeekConfig
from nanotrain_deepseek.model import DeepSeek

from nanotrain_core.pipeline.actions import Part
from nanotrain_core.recipe.source import find_recipe
from nanotrain_core.recipe.structure import structure


def fragment(name, **changes):
    """Build the model of a shipped fragment, with some keys changed."""
    import tomli

    table = tomli.loads(Path(find_recipe(f"fragments/{name}")).read_text())["model"]
    del table["use"]
    config, problems = structure(table | changes, DeepSeekConfig, "model")
    assert not problems
    return DeepSeek(config)


def parameters(model):
    """Return elements by name, of a model that never gets storage."""
    part = model.build(Part.whole(model.layers))
    return {name: p.numel() for name, p in part.named_parameters()}


@pytest.mark.parametrize(
    ("name", "billions"),
    [("deepseek_v3", "671.026"), ("deepseek_v2", "235.741"), ("deepseek_v2_lite", "15.706")],
)
def test_parameters_are_those_published(name, billions):
    total = sum(parameters(fragment(name, mtp=0)).values())
    assert f"{total / 1e9:.3f}" == billions


def test_module_for_the_second_token_has_11_6_billion_parameters_of_its_own():
    counts = parameters(fragment("deepseek_v3"))
    assert f"{sum(n for name, n in counts.items() if name.startswith('mtp.')) / 1e9:.1f}" == "11.6"
    assert [name for name in counts if "embed.weight" in name or "head.weight" in name] == [
        "embed.weight",
        "head.weight",
    ]


def test_v3_activates_36_6_billion_parameters_without_the_embedding():
    model = fragment("deepseek_v3", mtp=0)
    idle = sum(n for name, n in parameters(model).items() if ".experts." in name) * (256 - 8) / 256
    active = sum(parameters(model).values()) - idle
    assert f"{active / 1e9:.2f}" == "37.55"
    assert f"{(active - 129280 * 7168) / 1e9:.2f}" == "36.63"


@pytest.mark.parametrize(
    ("name", "gigaflops"),
    [("deepseek_v3", "250.45"), ("deepseek_v2", "155.3"), ("deepseek_v2_lite", "16.41")],
)
def test_megatron_1784_and_1475_operations_per_token_of_4096_are_those_computed(name, gigaflops):
    digits = len(gigaflops.partition(".")[2])
    assert f"{fragment(name, mtp=0).flops(4096).total / 1e9:.{digits}f}" == gigaflops


def test_second_token_costs_10_19_gigaflops():
    with_mtp, without = (fragment("deepseek_v3", mtp=mtp).flops(4096) for mtp in (1, 0))
    assert f"{(with_mtp.total - without.total) / 1e9:.2f}" == "10.19"
    assert with_mtp.layers == without.layers, "what predicts further tokens hangs at the head"


def test_dense_layers_of_v3_cost_as_many_weights_less():
    costs = fragment("deepseek_v3").flops(4096)
    dense, moe = costs.layers[0], costs.layers[-1]
    assert costs.layers == (dense,) * 3 + (moe,) * 58
    assert dense - moe == 6 * (3 * 7168 * 18432 - 3 * 7168 * 2048 * 9 - 7168 * 256)
