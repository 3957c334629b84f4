"""The example of context parallelism: what trains as one process, and what it refuses."""

import attrs
import pytest
from as_one_process import assert_trains_as_one_process
from compositions import CONTEXT_PARALLEL, MODELS
from examples_of_plugins import ALIBI, PLUGINS, example
from test_docs import failed

from nanotrain_core.errors import NanotrainError, RecipeError
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_engine


def sharing(topology, **around):
    wrappers = {"parallel": [{"use": "cp"}, *around.pop("parallel", ())]}
    overrides = {**around, **wrappers}
    return Case("topology", use="grid", topology=topology, overrides=overrides, plugins=[CONTEXT_PARALLEL])


@pytest.mark.parametrize(
    ("topology", "around", "told"),
    [
        (
            {"cp": 2},
            {"model": {"heads": 6, "width": 48, "kv_heads": 3}},
            "model.kv_heads: 3 key and value heads do not divide by cp = 2; cp could be 1 or 3, "
            "their number 2 or 4",
        ),
        (
            {"cp": 4, "tp": 2},
            {"parallel": [{"use": "tp"}]},
            "model.heads: 4 heads do not divide by tp x cp = 8; tp x cp could be 4, their number 8",
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


def refused(case):
    with pytest.raises(NanotrainError) as caught:
        make_engine(case, {"run": {"steps": 1}}).fit()
    return str(caught.value)


def test_a_model_whose_attention_is_its_own_is_refused_in_the_first_step():
    """No token would see those of other ranks."""
    case = sharing({"cp": 2}, model={"use": "alibi", **ALIBI})
    case = attrs.evolve(case, plugins=[*case.plugins, PLUGINS / "alibi.py"])
    assert run_ranks(refused, 2, case) == ["cp: 2 layers called ops.attention 0 times"] * 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("topology", "around"),
    [
        (
            {"cp": 2, "tp": 2},
            {"model": {**MODELS["transformer"], "kv_heads": 12}, "parallel": [{"use": "tp"}]},
        ),
        ({"cp": 4}, {"model": {"positions": "learned", "max_length": 16, "tied": True}}),
        (
            {"cp": 2, "dp": 2},
            {"model": {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_length": 8}}},
        ),
    ],
    ids=["grouped heads of tp", "learned positions", "angles of the whole length"],
)
def test_cp_with_more_models_trains_as_one_process(topology, around):
    model = {"data": {"vocab": 33}} if "parallel" in around else {}
    assert_trains_as_one_process(sharing(topology, **model, **around))


@pytest.mark.full
def test_cp_passes_every_check():
    assert failed(example("parallel", "cp", topology={"cp": 2})) == {}
