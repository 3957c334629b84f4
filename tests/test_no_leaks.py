"""A run that is over leaves nothing behind: engines can be made and dropped in one process."""

import gc
import os
import weakref

from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import train

CASE = Case("parallel", use="ddp", topology={"dp": 2})


def threads_before_training():
    """Return how many threads this rank has, then train: each process group has threads of its own."""
    found = len(os.listdir("/proc/self/task"))
    train(CASE, {})
    return found


def test_process_groups_go_with_their_run():
    counts = [run_ranks(threads_before_training, 2) for _ in range(3)]
    assert counts[1:] == counts[:1] * 2


def test_weights_go_with_their_engine():
    engine = RuntimeEngine.from_recipe(CASE.alone().recipe(), registry=CASE.registry())
    engine.fit()
    weight = weakref.ref(engine.run.placed[0].parameter)
    assert weight() is not None
    del engine
    gc.collect()
    assert weight() is None
