"""When a save by the clock is due, also where a GPU's host reads flags one call late, as here on request."""

import os
import time
from functools import partial
from unittest import mock

import pytest
import small_run
from nanotrain_sharded_ckpt_v2 import ShardedConfig
from nanotrain_sharded_ckpt_v2.checkpoint import ShardedCheckpoint
from nanotrain_sharded_ckpt_v2.flags import LateFlag

from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_run, rank
from nanotrain_core.testing.saving import state_of

TWO = Case("checkpoint", use="sharded_v2", topology={"dp": 2})
HOUR = 3600.0


def read(raised, late):
    """Return what this rank reads, where rank 1 raises its flag at some calls."""
    flag = LateFlag(make_run(TWO, {}).mesh, late=late)
    return [flag.any(mine and rank() == 1) for mine in raised]


@pytest.mark.parametrize(
    ("late", "found"), [(False, [False, True, False, True]), (True, [None, False, True, False])]
)
def test_each_call_returns_what_the_one_before_was_about(late, found):
    assert run_ranks(read, 2, [False, True, False, True], late) == [found, found]


def opened(folder, **config):
    run = make_run(TWO, {})
    checkpoint = ShardedCheckpoint(ShardedConfig(**config))
    checkpoint.open(folder, run.mesh)
    checkpoint._late, checkpoint._writing = (LateFlag(run.mesh, late=True) for _ in range(2))
    return checkpoint, state_of(run)


def due_by_the_clock(folder):
    """Return after which steps to save, where an hour passes in steps 2 and 5; 3 is saved."""
    checkpoint, state = opened(folder, every_minutes=1.0, every=0)
    found = []
    for step in range(1, 7):
        ahead = HOUR * ((step >= 2) + (step >= 5))
        with mock.patch.object(
            time, "monotonic", partial(lambda now, more: now() + more, time.monotonic, ahead)
        ):
            found.append(checkpoint.due(step))
            if step == 3:
                checkpoint.save(step, state)
                checkpoint.advance(wait=True)
    return found


def test_a_save_by_the_clock_is_due_one_step_later_and_once(tmp_path):
    """What was sent before a save is not about the time since: another would follow at once."""
    expected = [False, False, True, False, False, True]
    assert run_ranks(due_by_the_clock, 2, tmp_path) == [expected, expected]


def published(folder):
    """Return how many steps after each of two saves it was complete, once its files were written."""
    checkpoint, state = opened(folder)
    found = []
    for step in (1, 2):
        checkpoint.save(step, state)
        checkpoint._saving.join()
        reports = [checkpoint.advance(wait=False) for _ in range(3)]
        found.append([len(each) for each in reports])
    return found, checkpoint.steps()


def test_a_save_is_complete_one_step_after_its_files_were(tmp_path):
    expected = [[0, 1, 0], [0, 1, 0]], [1, 2]
    assert run_ranks(published, 2, tmp_path) == [expected, expected]


def test_a_restart_from_memory_does_not_postpone_a_save_by_minutes(tmp_path):
    """Such a restart loads no checkpoint: what counts is the age of the newest, or of the run."""
    folder, minute_ago = tmp_path / "checkpoints", time.time() - 61
    assert not small_run.opened(folder, every_minutes=1.0).due(1)
    (tmp_path / "recipe.toml").touch()
    assert not small_run.opened(folder, every_minutes=1.0).due(1)
    os.utime(tmp_path / "recipe.toml", (minute_ago, minute_ago))
    assert small_run.opened(folder, every_minutes=1.0).due(1)
    path = small_run.save(small_run.opened(folder, every_minutes=1.0), 1)
    assert not small_run.opened(folder, every_minutes=1.0).due(2)
    os.utime(path / "MANIFEST.json", (minute_ago, minute_ago))
    assert small_run.opened(folder, every_minutes=1.0).due(2)
    resumed = small_run.opened(folder, every_minutes=1.0)
    resumed.load("latest", small_run.state(0))
    assert not resumed.due(2)
