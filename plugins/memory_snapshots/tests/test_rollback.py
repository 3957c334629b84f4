"""A run that dies after a rollback of the guard goes on behind it, and not on the branch that was left."""

import contextlib

import pytest
from broken_runs import RECIPE, attempt, same

from nanotrain_core.api.torch import Monitor

GUARDED = RECIPE.replace("every = 100", "every = 2") + (
    """
[[monitor]]
use = "guard"
window = 8
warmup = 4
patience = 2
"""
)


class Spoils(Monitor):
    """Makes the gradients of some steps NaN, each once, whichever attempt takes it."""

    def __init__(self, steps):
        self.left = set(steps)

    def on_start(self, run):
        self.run = run

    def on_before_update(self, update):
        if update.step in self.left:
            self.left.remove(update.step)
            for placed in self.run.placed:
                placed.parameter.grad.fill_(float("nan"))


class Dies(Monitor):
    """Breaks the run off at a step, the second time that it comes there."""

    every_step = True

    def __init__(self, step, seen):
        self.step, self.seen = step, seen

    def on_step(self, report):
        if report.step == self.step:
            self.seen.append(report.step)
            if len(self.seen) == 2:
                raise Broken


class Broken(BaseException):
    """Stands for the end of a process."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run whose steps 5 and 6 are NaN, so that it goes back to step 4 and leaves their data out."""
    return attempt(tmp_path_factory.mktemp("whole"), "whole", recipe=GUARDED, monitors=[Spoils([5, 6])])


@pytest.mark.parametrize("step", [5, 6])
def test_it_goes_on_behind_the_rollback(tmp_path, whole, step):
    """Step 5 again: the newest snapshot is that of the rollback itself, with the data that it leaves out."""
    spoils = Spoils([5, 6])
    with contextlib.suppress(Broken):
        attempt(tmp_path, "run", recipe=GUARDED, monitors=[spoils, Dies(step, [])])
    ran = attempt(tmp_path, "run", again=True, recipe=GUARDED, monitors=[spoils])
    assert ran.first == step - 1
    assert same(ran, whole)


def test_it_goes_back_by_itself_where_it_died_before(tmp_path, whole):
    """After the first of the two bad steps: what the guard remembers comes back with the snapshot."""
    spoils = Spoils([5, 6])
    attempt(tmp_path, "run", recipe=GUARDED, monitors=[spoils], dies_at=6)
    spoils.left.add(6)  # it is taken again
    ran = attempt(tmp_path, "run", again=True, recipe=GUARDED, monitors=[spoils])
    assert ran.first == 5
    assert same(ran, whole)
