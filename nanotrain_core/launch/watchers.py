"""Monitors that a launch adds to a run, on every rank: all ranks have the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import time

from nanotrain_core.contracts import CheckpointReport, Monitor, RunInfo, StepEnd
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.run.log import record
from nanotrain_core.run.recovery import Restart


class AtStart(Monitor):
    """Does on rank 0 what must not be done for a run that is refused: weights have been taken by now."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act

    def on_start(self, run: RunInfo) -> None:
        """Do it."""
        if run.rank == 0:
            self.act()


class Mark(Monitor):
    """Leaves a file when a checkpoint has been saved: a restarted run then starts from its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """Leave it."""
        self.path.touch()


class FirstStep(Monitor):
    """Records how long after a failure the run took a step again."""

    def __init__(self, restart: Restart) -> None:
        self.restart: Restart | None = restart

    def on_start(self, run: RunInfo) -> None:
        """Remember who speaks."""
        self.restart = self.restart if run.rank == 0 else None

    def on_step_end(self, end: StepEnd) -> None:
        """Say it once."""
        if self.restart is not None and self.restart.failed_at is not None:
            seconds = round(time() - self.restart.failed_at, 2)
            record("info", "the first step after a failure", step=end.step, seconds=seconds)
            self.restart = None


def add_watchers(engine: RuntimeEngine, keep_recipe: Callable[[], None], mark: Path | None) -> None:
    """Add them to a run: before its own monitors who keeps its recipe, behind them the others.

    Args:
        engine: of the run.
        keep_recipe: done on rank 0 when the run starts.
        mark: see :class:`Mark`.
    """
    behind: list[Monitor] = [Mark(mark)] if mark is not None else []
    behind += [FirstStep(engine.restart)] if engine.restart.failed_at else []
    engine.events.monitors = [AtStart(keep_recipe), *engine.events.monitors, *behind]
