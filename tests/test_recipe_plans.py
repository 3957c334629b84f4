"""Each recipe for a machine fits it, and docs/recipes.md and the recipe itself say what is predicted."""

import re
from pathlib import Path

import pytest
from nanotrain_plan.hardware import find_hardware
from nanotrain_plan.model import count_flops, count_parameters
from nanotrain_plan.number_format import count, duration, size
from nanotrain_plan.plan import make_plan

from nanotrain_core.recipe.load import resolve_recipe

ROOT = Path(__file__).parents[1]
#: Recipe, and the number of ranks and the hardware that it is for.
MACHINES = [
    ("llama_1b", 1, "h100"),
    ("llama_8b", 8, "h100"),
    ("llama_70b", 64, "h100"),
    ("llama_70b", 512, "h100"),
    ("llama_70b_qlora", 1, "h100"),
    ("llama_70b_qlora", 8, "h100"),
    ("long_context", 8, "h100"),
    ("long_context", 16, "h100"),
    ("qwen3_30b_a3b", 32, "h100"),
    ("mixtral_8x7b", 32, "h100"),
    ("deepseek_v2_lite", 8, "h100"),
    ("deepseek_v3_671b", 2048, "h800"),
    ("deepseek_v3_128k", 2048, "h800"),
]
#: A plan of a small pipeline takes a second, of a large one many.
FIRST_TIER = [("llama_1b", 1, "h100")]


@pytest.mark.parametrize(
    ("name", "ranks", "hardware"),
    [pytest.param(*each, marks=() if each in FIRST_TIER else pytest.mark.full) for each in MACHINES],
)
def test_it_fits_and_is_predicted_as_documented(name, ranks, hardware):
    found = resolve_recipe(name, ranks=ranks)
    plan = make_plan(found.recipe, found.registry, found.layout, find_hardware(hardware))
    assert plan.fits
    assert plan.host.fits
    if plan.host.activations:
        said = f"{size(plan.host.activations)} of a node"
        assert said in re.sub(r"\n# ", " ", (ROOT / "recipes" / f"{name}.toml").read_text())
    assert plan.time.seconds + plan.checkpoints.seconds < found.recipe.run.grace
    memory = f"{size(plan.worst.peak)} of {size(plan.hardware.usable)}"
    rate, mfu = f"{count(plan.tokens_per_second)} tokens/s", f"{plan.tflops() / plan.peak_tflops:.1%}"
    tokens, time = count(plan.data.tokens), duration(plan.seconds)
    row = f"| `{name}` | {ranks} {hardware.upper()} | {memory} | {mfu} | {rate} | {tokens} | {time} |"
    print(row)
    assert row in (ROOT / "docs" / "recipes.md").read_text(), f"docs/recipes.md should have\n{row}"
    if ranks == resolve_recipe(name).recipe.run.ranks:
        said = f"{memory}, MFU {mfu}, {rate}, {time}"
        text = re.sub(r"\n# ", " ", (ROOT / "recipes" / f"{name}.toml").read_text())
        assert said in text, f"{name}.toml should say\n{said}"


GOLDEN = {
    "llama_1b": 1_235_814_400,
    "llama_8b": 8_030_261_248,
    "llama_70b": 70_553_706_496,
    "llama_70b_qlora": 70_553_706_496,
    "long_context": 8_030_261_248,
    "qwen3_30b_a3b": 30_532_122_624,
    "mixtral_8x7b": 46_702_792_704,
}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_model_has_as_many_parameters_as_the_released_one(name):
    found = resolve_recipe(name)
    assert count_parameters(found.recipe, found.registry).total == GOLDEN[name]


def test_v2_lite_has_its_parameters_and_flops():
    found = resolve_recipe("deepseek_v2_lite")
    assert count_parameters(found.recipe, found.registry).total == pytest.approx(15.706e9, abs=0.5e6)
    assert count_flops(found.recipe, found.registry).causal == pytest.approx(16.41e9, abs=5e6)
