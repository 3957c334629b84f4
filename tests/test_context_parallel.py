"""Context parallelism: what trains as one process, and what is refused, by all ways to communicate."""

import pytest
from as_one_process import assert_trains_as_one_process
from compositions import MODELS
from examples_of_plugins import ALIBI, PLUGINS
from nanotrain_plan.stages import dry_stages

from nanotrain_core.errors import NanotrainError, RecipeError
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_engine

OTHER = '; or write communication = "all_gather" in [[parallel]] use = "cp"'


def sharing(topology, communication="all_to_all", plugins=(), **around):
    wrappers = [{"use": "cp", "communication": communication}, *around.pop("parallel", ())]
    overrides = {**around, "parallel": wrappers}
    return Case("topology", use="grid", topology=topology, overrides=overrides, plugins=plugins)


@pytest.mark.parametrize(
    ("topology", "around", "told"),
    [
        (
            {"cp": 2},
            {"model": {"heads": 6, "width": 48, "kv_heads": 3}},
            "model.kv_heads: 3 key and value heads do not divide by cp = 2; cp could be 1 or 3, "
            f"their number 2 or 4{OTHER}",
        ),
        (
            {"cp": 4, "tp": 2},
            {"parallel": [{"use": "tp"}]},
            f"model.heads: 4 heads do not divide by tp x cp = 8; tp x cp could be 4, their number 8{OTHER}",
        ),
        (
            {"cp": 4, "dp": 2},
            {"batch": {"length": 3}},
            "batch.length: 3 tokens are fewer than cp = 4 ranks, which share each sequence; nearest: 4",
        ),
    ],
    ids=["key and value heads", "heads of tp", "tokens"],
)
def test_what_cp_does_not_divide_is_refused_before_ranks_start(topology, around, told):
    with pytest.raises(RecipeError) as caught:
        sharing(topology, **around).recipe()
    assert told in caught.value.lines


def test_a_misspelt_way_to_communicate_is_told_the_right_one():
    with pytest.raises(RecipeError) as caught:
        sharing({"cp": 2}, "all_gathr").recipe()
    assert "did you mean 'all_gather'?" in str(caught.value)


def refused(case):
    with pytest.raises(NanotrainError) as caught:
        make_engine(case, {"run": {"steps": 1}}).fit()
    return str(caught.value)


def test_a_model_whose_attention_is_its_own_is_refused_in_the_first_step():
    """No token would see those of other ranks."""
    case = sharing({"cp": 2}, model={"use": "alibi", **ALIBI}, plugins=[PLUGINS / "alibi.py"])
    assert run_ranks(refused, 2, case) == ["cp: 2 layers called attention of their ops 0 times"] * 2


@pytest.mark.parametrize("communication", ["all_gather", "ring"])
def test_heads_that_cp_does_not_divide_are_for_ways_that_leave_them(communication):
    sharing({"cp": 2}, communication, model={"heads": 6, "width": 48, "kv_heads": 3}).recipe()


def planned_attention(communication):
    """Return the FLOPs of attention that are planned for rank 0, by pass."""
    sizes = {"width": 64, "heads": 8, "kv_heads": 4}
    case = sharing({"cp": 4}, communication, model=sizes, batch={"length": 16}, precision={"use": "bf16"})
    recipe, registry = case.recipe(), case.registry()
    stages = dry_stages(recipe, registry, registry.build(recipe.topology).layout(4), host=False)
    return {action.kind: stages.phase(0, action).attention_flops for action in stages.actions[0]}


def test_attention_is_planned_to_take_as_many_flops_by_all_ways():
    wanted = planned_attention("all_to_all")
    assert wanted["B"] == 2.5 * wanted["F"] > 0
    assert planned_attention("all_gather") == planned_attention("ring") == wanted


LLAMA, TP = MODELS["transformer"], {"use": "tp"}
SELECTIVE = {"use": "recompute", "granularity": "selective"}
MORE = {
    "grouped heads of tp": ({"cp": 2, "tp": 2}, {"model": {**LLAMA, "kv_heads": 12}, "parallel": [TP]}),
    "learned positions": ({"cp": 4}, {"model": {"positions": "learned", "max_length": 16, "tied": True}}),
    "angles of the whole length": (
        {"cp": 2, "dp": 2},
        {"model": {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_length": 8}}},
    ),
}
ANY_HEADS = {
    "one key head": ({"cp": 4}, {"model": {**LLAMA, "kv_heads": 1}, "batch": {"length": 13}}),
    "heads that do not divide": ({"cp": 3, "tp": 2}, {"model": {**LLAMA, "kv_heads": 4}, "parallel": [TP]}),
    "parts of one or two tokens": ({"cp": 4}, {"batch": {"length": 5}}),
    "parts of one token": ({"cp": 3}, {"batch": {"length": 3}}),
    "pipeline and recompute": (
        {"cp": 2, "pp": 2},
        {"model": {**MODELS["deepseek_v3"], "layers": 4, "mtp": 2}, "schedule": {"use": "1f1b"}}
        | {"parallel": [{"use": "recompute"}], "batch": {"length": 7}},
    ),
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("communication", "topology", "around"),
    [
        *(pytest.param("all_to_all", *each, id=name) for name, each in MORE.items()),
        *(
            pytest.param(communication, *each, id=f"{name}, {communication}")
            for communication in ("all_gather", "ring")
            for name, each in {**MORE, **ANY_HEADS}.items()
        ),
        pytest.param("ring", {"cp": 2}, {"parallel": [SELECTIVE]}, id="selective, ring"),
    ],
)
def test_cp_with_more_models_trains_as_one_process(communication, topology, around):
    vocab = around.get("model", {}).get("vocab")
    data = {"data": {"vocab": vocab}} if vocab else {}
    assert_trains_as_one_process(sharing(topology, communication, **data, **around))
