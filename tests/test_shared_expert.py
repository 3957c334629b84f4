"""Qwen2-MoE's shared expert, weighted by a sigmoid of each token, trains the same on every layout."""

import attrs
import pytest
from as_one_process import assert_trains_as_one_process
from compositions import Composition

SHARED = {"qk_norm": False, "attention_bias": True, "output_bias": False, "shared_expert_ffn": 16}


def layout(**choices):
    defaults = {"tp": 1, "pp": 1, "dp": 1, "ep": 1, "etp": 1, "schedule": "accumulate", "sp": False}
    more = {"model": "moe", "tied": False, "microbatch": 2, "experts_first": False, "zero": 0}
    return Composition(**(defaults | more | choices))


LAYOUTS = {
    "tp2-sp-ep2": layout(tp=2, sp=True, ep=2),
    "tp2-pp2-etp2-zb_h1": layout(tp=2, pp=2, etp=2, schedule="zb_h1"),
    "dp2-ep2-recompute": layout(dp=2, ep=2, recompute=True),
    "cp2-tp2-sp": layout(cp=2, tp=2, sp=True, communication="all_gather"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_one_process(name):
    case = LAYOUTS[name].case()
    model = {**case.overrides["model"], **SHARED}
    assert_trains_as_one_process(attrs.evolve(case, overrides={**case.overrides, "model": model}))
