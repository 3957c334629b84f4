"""What a schedule answers depends on what it is asked, and on nothing else."""

from __future__ import annotations

from itertools import pairwise

from nanotrain_core.pipeline.actions import Costs
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check
from nanotrain_core.testing.checks.schedule import (
    many_microbatches,
    pipeline_of,
    schedule_of,
    stages_of,
)

#: How much dearer one layer or end is than any other: as a large vocabulary makes the head of a small model.
DEAR = 1000.0


@check("schedule", since="0.2")
def schedule_is_stateless(case: Case) -> None:
    """Of whatever number of microbatches it was asked before, it gives a new object's lists: batches grow."""
    pp, counts = pipeline_of(case), many_microbatches(case)
    asked = schedule_of(case)
    for before, count in (*pairwise(counts), *pairwise(reversed(counts))):
        asked.actions(pp, before)
        same = asked.actions(pp, count) == schedule_of(case).actions(pp, count)
        assert same, f"{count} microbatches: other actions after it was asked for {before}"


@check("schedule", since="0.2")
def stages_exist_whatever_they_cost(case: Case) -> None:
    """Costs move layers between stages; how many stages each rank holds the number of layers says alone.

    A recipe is checked before there is a model, with equal costs.
    """
    pp, stages = pipeline_of(case), sum(map(len, stages_of(case)))
    for layers in (stages, 2 * stages, 4 * stages):
        alike = Costs.alike(layers)
        try:
            wanted = [part.rank for part in schedule_of(case).parts(alike, pp)]
        except ValueError:
            continue  # it refuses so many, and says so before a run starts
        first, last = (DEAR, *alike.layers[1:]), (*alike.layers[1:], DEAR)
        for what, costs in {
            "head": Costs(layers=alike.layers, head=DEAR),
            "embedding": Costs(layers=alike.layers, embedding=DEAR),
            "first layer": Costs(layers=first),
            "last layer": Costs(layers=last),
        }.items():
            told = f"{layers} layers on {pp} ranks, with a {what} of {DEAR:g} layers' cost"
            try:
                parts = schedule_of(case).parts(costs, pp)
            except ValueError as error:
                raise AssertionError(f"{told}: refused, where equal ones are not: {error}") from None
            found = [part.rank for part in parts]
            assert found == wanted, f"{told}: stages on ranks {found}, and with equal ones {wanted}"
