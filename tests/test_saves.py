"""What a save that fails means to a run."""

import pytest

from nanotrain_core.errors import CheckpointError, SaveFailed
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine


def failing_once(checkpoint):
    """Have the checkpoint's first save fail; return the steps it is asked for."""
    save, asked = checkpoint.save, []

    def fail_once(step, state):
        asked.append(step)
        if len(asked) == 1:
            raise CheckpointError("the disk was full")
        save(step, state)

    checkpoint.save = fail_once
    return asked


def make(folder):
    changes = {"run": {"steps": 5}, "checkpoint": {"use": "simple", "every": 2}}
    return make_engine(Case("optimizer", use="sgd"), changes, folder=folder)


def test_a_run_bears_a_save_that_fails(tmp_path):
    engine = make(tmp_path)
    asked = failing_once(engine.run.checkpoint)
    assert engine.fit().reason == "done"
    assert asked == [2, 4, 5]
    assert engine.run.checkpoint.steps() == [4, 5]


def test_a_run_that_is_stopped_where_a_save_is_due_does_not_end_well_without_it(tmp_path):
    """It would have no checkpoint to go on from, and say that all is well."""
    engine = make(tmp_path)
    asked = failing_once(engine.run.checkpoint)
    train_step = engine._train_step

    def stop_at_the_second():
        if engine.step == 1:
            engine.stop.wish("stopped")
        return train_step()

    engine._train_step = stop_at_the_second
    with pytest.raises(SaveFailed, match="the disk was full"):
        engine.fit()
    assert asked == [2]
