"""Monitors that a launch adds to a run, on every rank: all ranks have the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nanotrain_core.contracts import CheckpointReport, Monitor, RunInfo


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
