"""A run that is over leaves nothing behind: engines can be made and dropped in one process."""

import gc
import os
import weakref

import pytest

from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import train

CASES = [
    Case("parallel", use="ddp", topology={"dp": 2}),
    Case("optimizer", use="zero12", topology={"dp": 2}, overrides={"kernels": {"use": "torch"}}),
]


def threads_before_training(case):
    """Return how many threads this rank has, then train: each process group has threads of its own."""
    found = len(os.listdir("/proc/self/task"))
    train(case, {})
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.use)
def test_process_groups_go_with_their_run(case):
    counts = [run_ranks(threads_before_training, 2, case) for _ in range(3)]
    assert counts[1:] == counts[:1] * 2


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.use)
def test_weights_go_with_their_engine(case):
    engine = RuntimeEngine.from_recipe(case.alone().recipe(), registry=case.registry())
    engine.fit()
    weight = weakref.ref(engine.run.placed[0].parameter)
    assert weight() is not None
    del engine
    gc.collect()
    assert weight() is None
