"""Routers see whole sequences and experts shares of them: the numbers are those of one process."""

import pytest

from nanotrain_core.testing import Case, conformance
from nanotrain_core.testing.checks.parallel import gradients_equal


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


test_experts_exhaustively = pytest.mark.full(
    conformance(
        *(case(tp, dp, sequence_parallel=sp) for tp, dp in ((2, 1), (4, 1), (2, 2)) for sp in (True, False)),
    )
)
