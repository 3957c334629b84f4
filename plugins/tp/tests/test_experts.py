"""Routers see whole sequences and experts shares of them: the numbers are those of one process."""

from pathlib import Path

import pytest

from nanotrain_core.testing import Case, conformance, run_ranks
from nanotrain_core.testing.checks.parallel import gradients_equal
from nanotrain_core.testing.compare import assert_same, whole
from nanotrain_core.testing.probe import train


def case(tp, dp, *, sequence_parallel, gather_again=False):
    return Case(
        "parallel",
        use="tp",
        config={"sequence_parallel": sequence_parallel, "gather_again": gather_again},
        topology={"dp": dp, "tp": tp},
        overrides={
            "parallel": [{"use": "tp"}, {"use": "summed"}],
            "model": {"use": "routed"},
            "batch": {"length": 15},  # ranks' shares differ
        },
        name=f"dp{dp}-tp{tp}-{'shares' if sequence_parallel else 'whole'}",
    )


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_gradients_are_those_of_one_process(sequence_parallel):
    gradients_equal(case(2, 1, sequence_parallel=sequence_parallel), "fp64")


def test_gradients_are_the_same_where_inputs_are_gathered_again():
    gradients_equal(case(2, 1, sequence_parallel=True, gather_again=True), "fp64")


def trained(*parallel, tp=1, **overrides):
    """Return the weights of a run with these wrappers by name."""
    around = {"precision": {"use": "fp64"}, "parallel": [*parallel], **overrides}
    plugin = Path(__file__).with_name("scaled_inputs.py")
    case = Case("topology", use="grid", topology={"tp": tp}, overrides=around, plugins=(plugin,))
    return whole([trace.weights for trace in run_ranks(train, case.world_size, case, {})], atol=1e-9)


@pytest.mark.parametrize(
    "sequence_parallel",
    [pytest.param(False, marks=pytest.mark.full, id="whole"), pytest.param(True, id="shares")],
)
def test_inputs_that_an_earlier_wrapper_scales_have_the_gradients_of_one_process(sequence_parallel):
    """Those of routers were a share's and taken for complete, or those of experts complete and summed."""
    tp = {"use": "tp", "sequence_parallel": sequence_parallel}
    ranks = trained({"use": "scaled"}, tp, model={"use": "routed"}, tp=2)
    alone = trained({"use": "scaled"}, model={"use": "routed"})
    assert {name.rpartition(".")[2] for name in alone} >= {"scale"}
    assert_same(ranks, alone, "weights", atol=1e-9)


@pytest.mark.parametrize("later", ["completed", "summednorm"])
def test_a_later_wrapper_that_completes_its_gradient_itself_or_has_it_summed_trains_as_one_process(later):
    """The sum that one had made itself was summed again: its gradient was twice as large."""
    sgd = {"use": "sgd", "lr": 0.1}
    ranks = trained({"use": "tp"}, {"use": later}, optimizer=sgd, tp=2)
    alone = trained({"use": later}, optimizer=sgd)
    assert "norm.scale" in alone
    assert_same(ranks, alone, "weights", atol=1e-9)


def test_a_later_hook_that_comes_first_at_a_column_has_the_gradient_of_one_process():
    """It was refused, though it sees the whole input where sequences stay whole."""
    sgd = {"use": "sgd", "lr": 0.1}
    ranks = trained({"use": "tp", "sequence_parallel": False}, {"use": "queries"}, optimizer=sgd, tp=2)
    alone = trained({"use": "queries"}, optimizer=sgd)
    assert "layers.0.attn.q.scale" in alone
    assert_same(ranks, alone, "weights", atol=1e-9)


test_experts_exhaustively = pytest.mark.full(
    conformance(
        *(case(tp, dp, sequence_parallel=sp) for tp, dp in ((2, 1), (4, 1), (2, 2)) for sp in (True, False)),
    )
)
