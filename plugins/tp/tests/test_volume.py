"""How much ranks tell each other: per layer what the paper counts, and not once per module that reads it.

Source: Korthikanti et al., arXiv 2205.05198, section 4.2.2: two all-gathers and two reduce-scatters of the
[S, B, D] activations each way, the volume of the two all-reduces they replace.
"""

from collections import Counter
from math import prod

import pytest

from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import train

RANKS, MICROBATCHES, MICROBATCH, LENGTH = 2, 4, 2, 16


def activations_sent(model, width, *, sequence_parallel=True):
    """Count, by operator, how many whole activations a microbatch's collectives are called with."""
    case = Case(
        "parallel",
        use="tp",
        config={"sequence_parallel": sequence_parallel},
        topology={"tp": RANKS},
        overrides={"parallel": [{"use": "tp"}, {"use": "summed"}], "model": model},
    )
    options = {"check_collectives": True, "log_collectives": True}  # of the process group
    trace, _ = run_ranks(train, RANKS, case, {"run": {"steps": 1}}, **options)
    found = Counter()
    for operator, _, tensors in trace.collectives:
        shape = [int(n) for n in tensors[0].partition("[")[2].rstrip("]").split(",") if n]
        if len(shape) == 3 and shape[-1] == width:
            name = operator.partition(".")[0].strip("_")
            axis_left_out = RANKS if name == "alltoall_base" else 1  # of the log, since ranks may differ
            found[name] += prod(shape) * axis_left_out
    whole = MICROBATCHES * MICROBATCH * LENGTH * width
    return {operator: numbers / whole for operator, numbers in found.items()}


@pytest.mark.full
@pytest.mark.parametrize(
    ("sequence_parallel", "each"),
    [
        (True, {"broadcast": 4, "alltoall_base": 4}),
        pytest.param(False, {"allreduce": 4}, marks=pytest.mark.full),
    ],
    ids=["shares", "whole"],
)
def test_one_more_layer_adds_two_of_each_each_way(sequence_parallel, each):
    two, three = (activations_sent({"layers": n}, 32, sequence_parallel=sequence_parallel) for n in (2, 3))
    added = {operator: three[operator] - two[operator] for operator in three}
    assert {operator: n for operator, n in added.items() if n} == each


@pytest.mark.full
def test_routers_and_shared_experts_gather_their_input_once():
    sent = activations_sent({"use": "routed"}, 32)
    forward, backward = 2 * (1 + 1) + 1, 2 * (1 + 1) + 1  # two layers, attention and experts; head; embedding
    assert sent["broadcast"] == forward + backward
