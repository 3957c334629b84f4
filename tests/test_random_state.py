"""A process's random-number streams: all of them, and where each of them is."""

import random

import numpy as np
import pytest
import torch

from nanotrain_core.run.random_state import capture, restore, seed_all

CPU = torch.device("cpu")
DRAWS = {
    "torch": lambda: torch.rand(3).tolist(),
    "python": lambda: [random.random(), random.gauss(0.0, 1.0)],
    "numpy": lambda: [*np.random.rand(3), np.random.randn()],
}


@pytest.fixture(autouse=True)
def leave_streams_alone():
    before = capture(CPU)
    yield
    restore(before)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_restored_stream_goes_on_where_it_was(draw, before):
    """Gaussians come in pairs: after one of them, the other is part of the state."""
    seed_all(5, 0)
    for _ in range(before):
        draw()
    saved = capture(CPU)
    expected = [draw() for _ in range(3)]
    seed_all(6, 0)
    restore(saved)
    assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_each_rank_and_seed_has_streams_of_its_own(draw):
    found = []
    for seed, rank in ((5, 0), (5, 1), (6, 0), (5, 0)):
        seed_all(seed, rank)
        found.append(str(draw()))
    assert found[0] == found[3]
    assert len(set(found)) == 3


def test_a_checkpoint_from_before_more_was_kept_restores_what_it_has():
    seed_all(5, 0)
    saved = {name: stream for name, stream in capture(CPU).items() if name in ("torch", "python")}
    expected = (torch.rand(3).tolist(), random.random())
    seed_all(6, 0)
    restore(saved)
    assert (torch.rand(3).tolist(), random.random()) == expected
