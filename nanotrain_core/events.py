"""Tells monitors what happens, and keeps a failing monitor from taking the run with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from nanotrain_core.contracts import (
    CheckpointReport,
    EndReport,
    EvaluationReport,
    Monitor,
    RunInfo,
    StepReport,
)
from nanotrain_core.errors import NanotrainError
from nanotrain_core.stop import StopRequest


class Events:
    """Calls every monitor in the recipe's order."""

    def __init__(self, monitors: Sequence[Monitor], stop: StopRequest, *, strict: bool = False) -> None:
        self.monitors, self.stop, self.strict = monitors, stop, strict
        self.log = structlog.get_logger("nanotrain.monitor")

    def start(self, run: RunInfo) -> None:
        """The run is about to take its first step."""
        self._tell("on_start", run)

    def step(self, report: StepReport) -> None:
        """A step was logged."""
        self._tell("on_step", report)

    def evaluation(self, report: EvaluationReport) -> None:
        """Validation loss was measured."""
        self._tell("on_evaluation", report)

    def checkpoint(self, report: CheckpointReport) -> None:
        """A checkpoint is complete."""
        self._tell("on_checkpoint", report)

    def end(self, report: EndReport) -> None:
        """The run is over, well or not."""
        self._tell("on_end", report)

    def _tell(self, event: str, *arguments: Any) -> None:
        for monitor in self.monitors:
            try:
                if getattr(monitor, event)(*arguments) == "stop":
                    self.stop.wish("stopped")
            except NanotrainError:
                raise  # said on purpose: the monitor found the run not worth going on
            except Exception:
                if self.strict:
                    raise
                name = f"{type(monitor).__name__}.{event}"
                self.log.exception("a monitor failed and the run goes on", monitor=name)


class Mark(Monitor):
    """Leaves a file when a checkpoint has been saved: a restarted run then starts from its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """Leave it."""
        self.path.touch()
