"""Every layout of the pairwise matrix goes on from a checkpoint of every other, as that would have gone on.

Weights, moments and the number of steps taken travel; the schedule, the cut into microbatches, the wrappers
and who holds optimizer state are the target's own.
"""

from functools import cache
from itertools import groupby, permutations
from operator import attrgetter

import attrs
import pytest
from compositions import Composition, pairwise
from test_resume_on_layouts import assert_goes_on, run


@cache
def layouts() -> dict[str, list[Composition]]:
    """Return the layouts of the matrix for each model, which is the same for all of them."""
    alike = [attrs.evolve(composition, tied=True) for composition in pairwise()]
    by_model = groupby(sorted(set(alike), key=attrs.astuple), key=attrgetter("model"))
    return {model: list(group) for model, group in by_model}


def pairs():
    """Return every ordered pair of two layouts of one model."""
    found = [pair for group in layouts().values() for pair in permutations(group, 2)]
    return [
        pytest.param(*pair, id=f"{pair[0].id}-to{pair[1].id.removeprefix(pair[1].model)}") for pair in found
    ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that trains a source 3 steps, once, and keeps the checkpoint after the second."""

    @cache
    def train(source):
        folder = tmp_path_factory.mktemp("run")
        return folder, run(source, "sharded_v2", folder, save_at=2, model=EIGHT)

    return train


#: A layer for every stage of the longest pipeline.
EIGHT = {"layers": 8}


@pytest.mark.full
@pytest.mark.parametrize(("source", "target"), pairs())
def test_goes_on_from_the_checkpoint_of_another_layout(saved, source, target):
    folder, straight = saved(source)
    assert_goes_on(run(target, "sharded_v2", folder, resume="2", model=EIGHT), straight, atol=1e-9)
