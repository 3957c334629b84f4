"""Parameters inside the split region: their gradients are complete, or nobody trains on them."""

from pathlib import Path

import pytest

from nanotrain_core.testing import Case, RankFailure, conformance, run_ranks
from nanotrain_core.testing.case import TINY
from nanotrain_core.testing.checks.parallel import gradients_equal
from nanotrain_core.testing.probe import make_run

MODEL = str(Path(__file__).with_name("qk_norm.py"))


def case(role, *, sequence_parallel):
    return Case(
        "parallel",
        use="tp",
        config={"sequence_parallel": sequence_parallel},
        topology={"tp": 2},
        overrides={
            "parallel": [{"use": "tp"}, {"use": "summed"}],
            "model": {**TINY["model"], "use": "qk_norm", "role": role},
        },
        plugins=(MODEL,),
        name=f"{role}-{'shares' if sequence_parallel else 'whole'}",
    )


test_inner = pytest.mark.full(conformance(*(case("INNER", sequence_parallel=sp) for sp in (True, False))))


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_gradients_of_norms_of_heads_are_complete(sequence_parallel):
    gradients_equal(case("INNER", sequence_parallel=sequence_parallel), "fp64")


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("sequence_parallel", [True, pytest.param(False, marks=pytest.mark.full)])
def test_qwen_trains_as_one_process_does(sequence_parallel, tp):
    """Norms of heads as in Qwen3, biases on queries, keys and values alone as in Qwen2; tp 4 repeats some."""
    model = {**TINY["model"], "kv_heads": 2, "qk_norm": True, "attention_bias": True, "output_bias": False}
    config = {"use": "tp", "sequence_parallel": sequence_parallel}
    overrides = {"parallel": [config, {"use": "summed"}], "model": model}
    gradients_equal(Case("parallel", use="tp", topology={"tp": tp}, overrides=overrides), "fp64")


def test_without_a_role_they_are_complete_where_every_whole_parameter_is_summed():
    gradients_equal(case("none", sequence_parallel=True), "fp64")


def test_the_wrong_role_is_caught_by_the_harness():
    with pytest.raises(AssertionError, match=r"layers\.0\.attn\.[qk]\.norm\.weight"):
        gradients_equal(case("NORM", sequence_parallel=False), "fp64")


def test_without_a_role_they_are_refused_where_sequences_stay_whole():
    with pytest.raises(RankFailure) as caught:
        run_ranks(make_run, 2, case("none", sequence_parallel=False), {})
    assert (
        "NanotrainError: layers.0.attn.q.norm.weight has no role: where sequences stay whole, tp cannot tell "
        "whether each rank's gradient of it is partial. Tag its module Role.INNER if it lies between COLUMN "
        "and ROW, else Role.NORM; or set sequence_parallel" in str(caught.value)
    )
