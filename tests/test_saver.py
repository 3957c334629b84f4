"""What a save that fails means to a run."""

import pytest
from test_run import metrics

from nanotrain_core.contracts import Monitor
from nanotrain_core.errors import CheckpointError, SaveFailed
from nanotrain_core.testing import Case, run_ranks
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


def test_a_report_tells_monitors_what_retention_goes_by(tmp_path):
    class Doubts(Monitor):
        def suspect_steps(self):
            return 2

        def on_checkpoint(self, report):
            reports.append((report.step, report.trusted, report.skipped))

    engine, reports = make(tmp_path), []
    engine.events.monitors.append(Doubts())
    engine.fit()
    assert reports == [(2, 0, 0), (4, 2, 0), (5, 3, 0)]


def test_a_run_that_is_stopped_where_a_save_is_due_does_not_end_well_without_it(tmp_path):
    """It would have no checkpoint to go on from, and say that all is well."""
    engine = make(tmp_path)
    asked = failing_once(engine.run.checkpoint)
    train_step = engine._train_step

    def stop_at_the_second():
        if engine.step == 1:
            engine.stop.request("stopped")
        return train_step()

    engine._train_step = stop_at_the_second
    with pytest.raises(SaveFailed, match="the disk was full"):
        engine.fit()
    assert asked == [2]


class Taken:
    """A file where the folder of checkpoints belongs, from one step to another."""

    def __init__(self, engine, first, last):
        self.place, self.steps = engine.folder / "checkpoints", range(first, last + 1)
        self.engine, self.train_step = engine, engine._train_step

    def __call__(self):
        if self.engine.run.mesh.rank == 0:
            if self.engine.step + 1 in self.steps:
                self.place.touch()
            elif self.place.is_file():
                self.place.unlink()
        return self.train_step()


def train_without_a_place(folder, kind, first, last):
    case = Case("parallel", use="ddp", topology={"dp": 2})
    changes = {
        "run": {"steps": 5},
        "checkpoint": {"use": kind, "every": 4},
        "monitor": [{"use": "jsonl"}],
    }
    engine = make_engine(case, changes, folder=folder)
    engine._train_step = Taken(engine, first, last)
    try:
        return engine.fit().reason
    except SaveFailed as problem:
        return str(problem)


@pytest.mark.parametrize("kind", ["simple", "sharded_v2"])
def test_monitors_hear_of_a_save_that_fails(tmp_path, kind):
    """A dashboard reads the metrics, not stderr."""
    assert run_ranks(train_without_a_place, 2, tmp_path, kind, 4, 4) == ["done", "done"]
    (row,) = metrics(tmp_path, "save_failed")
    assert (row["step"], row["in_a_row"]) == (4, 1)
    assert str(tmp_path / "checkpoints") in row["problem"]
    assert [row["step"] for row in metrics(tmp_path, "checkpoint")] == [5]


def test_they_hear_of_the_one_that_ends_the_run_too(tmp_path):
    said = run_ranks(train_without_a_place, 2, tmp_path, "sharded_v2", 4, 5)
    assert all(text.endswith("saves that failed in a row: 2") for text in said)
    rows = metrics(tmp_path, "save_failed")
    assert [(row["step"], row["in_a_row"]) for row in rows] == [(4, 1), (5, 2)]
    (end,) = metrics(tmp_path, "end")
    assert end["reason"] == "failed"
