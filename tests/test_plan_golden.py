"""DeepSeek-V3 and V2-Lite, and published rates: what a plan says of them."""

import json

import pytest
from nanotrain_plan.model import count_flops, count_parameters

from nanotrain_core.cli import main
from nanotrain_core.recipe.load import resolve_recipe

#: Tokens/s of a device, and TFLOP/s as published: causal or not, further tokens counted or not.
PUBLISHED = [
    ("DeepSeek, H800, causal", 1542, 385, "causal"),
    ("DeepSeek, H800, not causal", 1542, 432, "non_causal"),
    ("NVIDIA, H100, with MTP", 1297, 338, "model"),
    ("NVIDIA, GB200, with MTP", 4969, 1292, "model"),
    ("NVIDIA, GB300, with MTP", 6422, 1670, "model"),
    ("NeMo AutoModel, H100", 1002, 250, "causal"),
]


@pytest.fixture(scope="module")
def v3():
    return resolve_recipe("deepseek_v3_671b")


def test_parameters_of_v3(v3):
    found = count_parameters(v3.recipe, v3.registry)
    assert found.total == pytest.approx(671.026e9, abs=0.5e6)
    assert found.mtp == pytest.approx(11.6e9, rel=0.005)
    assert found.active == pytest.approx(37.55e9, abs=5e6)


@pytest.mark.parametrize(("who", "rate", "tflops", "convention"), PUBLISHED, ids=[p[0] for p in PUBLISHED])
def test_flops_of_v3_are_those_of_published_pairs(v3, who, rate, tflops, convention):
    flops = count_flops(v3.recipe, v3.registry)
    assert (flops.causal / 1e9, flops.non_causal / 1e9) == pytest.approx((250.45, 281.15), abs=0.005)
    assert flops.mtp / 1e9 == pytest.approx(10.19, abs=0.005)
    assert rate * getattr(flops, convention) / 1e12 == pytest.approx(tflops, rel=0.005)


@pytest.mark.full
def test_v3_on_2048_ranks(capsys):
    """A middle rank has 1.64B parameters; optimizer state is shared over 128 ranks, of experts over 2."""
    assert main(["plan", "deepseek_v3_671b", "--hardware", "h800", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    middle = plan["memory"]["ranks"][7]["between_steps"]
    assert middle["weights"] == pytest.approx(2 * 1.64e9, rel=0.005)
    assert middle["masters"] + middle["optimizer"] == pytest.approx(2.8e9, rel=0.03)
    assert plan["checkpoints"]["bytes"] == pytest.approx(682.64e9 * (2 + 4 + 4), rel=0.001)
    assert plan["pipeline"]["microbatches"] == 120
