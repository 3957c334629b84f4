"""The table of the ``fp8`` monitor has the modules of all ranks, with the counts of one process.

In the first step every rank multiplies numbers that one process multiplies too, so counts and largest
numbers are equal, not near, wherever the same elements share a tile.
"""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from test_fp8 import DDP, EP, MODEL

from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.checks.parallel import assert_same_reports, traces
from nanotrain_core.testing.compare import assert_bitwise, whole
from nanotrain_core.testing.probe import train

SHARES = ("underflow", "overflow", "at_largest")
EXPERTS = ("layers.1.moe.experts", "mtp.0.block.moe.experts")


LAYOUTS = {
    "one": ({}, {}),
    "pp2": ({"pp": 2}, {"schedule": {"use": "zb_h1"}, "parallel": [DDP]}),
    "ep2": ({"dp": 2, "ep": 2}, {"parallel": [EP, DDP]}),
}


def case_of(layout, precision, **config):
    topology, around = LAYOUTS[layout]
    around = {
        "model": MODEL,
        "batch": {"sequences": 8, "microbatch": 2, "length": 32},
        "optimizer": {"use": "adamw", "lr": 3e-3},
        "precision": {"use": precision},
        **around,
    }
    return Case("monitor", use="fp8", config=config, topology=topology, overrides=around)


@cache
def first_table(layout, precision):
    """Return the figures of the first step, by module and operand."""
    case = case_of(layout, precision)
    with TemporaryDirectory() as folder:
        run_ranks(train, case.world_size, case, {"run": {"steps": 1}}, folder=Path(folder))
        (line,) = (Path(folder) / "fp8.jsonl").read_text().splitlines()
    return {
        module: {operand: as_counted(figures) for operand, figures in operands.items()}
        for module, operands in json.loads(line)["modules"].items()
    }


def as_counted(figures):
    """Return shares without what their means over ranks round."""
    return {name: round(x, 12) if name in SHARES else x for name, x in figures.items()}


@pytest.mark.full_cases("fp8_deepseek_v3", "fp8_hybrid")
@pytest.mark.parametrize("precision", ["fp8_deepseek_v3", "fp8_hybrid"])
def test_over_pipeline_stages_it_is_the_table_of_one_process(precision):
    found, alone = (first_table(layout, precision) for layout in ("pp2", "one"))
    assert {"layers.0.ffn.gate", "mtp.0.block.attn.o"} <= set(found)  # of the first stage and of the last
    assert found == alone


def test_over_expert_ranks_experts_are_counted_once_and_weights_that_every_rank_has_on_each():
    found, alone = (first_table(layout, "fp8_deepseek_v3") for layout in ("ep2", "one"))
    assert set(found) == {*alone, *EXPERTS}
    for module, operands in alone.items():
        of_experts = "experts" in module
        for operand, figures in operands.items():
            copies = 2 if operand == "W" and not of_experts else 1
            wanted = {**figures, "elements": copies * figures["elements"]}
            got = found[module][operand]
            if not of_experts or operand == "W" or (module.endswith("down") and operand == "x"):
                assert got == wanted, (module, operand)
            else:  # rounded on the way, or tiles have rows of both ranks' microbatches
                assert got["elements"] == wanted["elements"], (module, operand)


@pytest.mark.parametrize("experts", EXPERTS)
def test_what_is_rounded_on_the_way_to_experts_is_what_one_process_rounds_there(experts):
    found, alone = (first_table(layout, "fp8_deepseek_v3") for layout in ("ep2", "one"))
    sent, parts = found[experts]["sent"], [alone[f"{experts}.gate+up"]["x"], alone[f"{experts}.down"]["dy"]]
    for name in ("underflow", "overflow", "at_largest"):
        assert round(sent[name] * sent["elements"]) == sum(round(p[name] * p["elements"]) for p in parts)
    assert sent["elements"] == sum(part["elements"] for part in parts)
    assert sent["amax"] == max(part["amax"] for part in parts)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["pp2", "ep2"])
def test_a_run_over_ranks_has_the_numbers_of_one_without_it(layout):
    case = case_of(layout, "fp8_deepseek_v3", every=2)
    evaluated = {"evaluation": {"every": 2, "sequences": 8}}
    watched, alone = (traces(case, **evaluated, **changes) for changes in ({}, {"monitor": []}))
    for ours, theirs in zip(watched, alone, strict=True):
        assert_same_reports(ours, theirs, atol=0.0)
        assert ours.evaluations == theirs.evaluations
        assert_bitwise(ours.streams, theirs.streams, "random-number streams")
    weights = (whole([trace.weights for trace in ranks]) for ranks in (watched, alone))
    assert_bitwise(*weights, "weights after 3 steps")
