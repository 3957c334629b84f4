"""How much ranks tell each other: per layer what the paper counts, and not once per module that reads it.

Source: Korthikanti et al., arXiv 2205.05198, section 4.2.2: two all-gathers and two reduce-scatters of the
[S, B, D] activations each way, the volume of the two all-reduces they replace.
"""

from collections import Counter
from math import prod

import pytest

from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import train

RANKS, SEQUENCES, MICROBATCH, LENGTH, WIDTH = 2, 8, 2, 16, 32
ACTIVATIONS = MICROBATCH * LENGTH * WIDTH


def activations_sent(layers, *, sequence_parallel):
    """Count, by operator, how many whole activations the collectives of a step are called with."""
    case = Case(
        "parallel",
        use="tp",
        config={"sequence_parallel": sequence_parallel},
        topology={"tp": 2},
        overrides={"parallel": [{"use": "tp"}, {"use": "ddp"}], "model": {"layers": layers}},
    )
    (trace, _) = run_ranks(train, 2, case, {"run": {"steps": 1}})
    found = Counter()
    for operator, _, tensors in trace.collectives:
        shape = [int(n) for n in tensors[0].partition("[")[2].rstrip("]").split(",") if n]
        if len(shape) == 3 and shape[-1] == WIDTH:
            name = operator.partition(".")[0].strip("_")
            found[name] += prod(shape) * (
                RANKS if name == "alltoall_base" else 1
            )  # the log leaves an axis out
    return {operator: n / ACTIVATIONS for operator, n in found.items()}


@pytest.mark.parametrize(
    ("sequence_parallel", "each"),
    [(True, {"broadcast": 4, "alltoall_base": 4}), (False, {"allreduce": 4})],
    ids=["shares", "whole"],
)
def test_one_more_layer_adds_two_of_each_each_way(sequence_parallel, each):
    two, three = (activations_sent(n, sequence_parallel=sequence_parallel) for n in (2, 3))
    microbatches = SEQUENCES // MICROBATCH
    assert {op: (three[op] - two[op]) / microbatches for op in three} == each
