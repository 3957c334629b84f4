"""Rows in which a run is asked to stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from random import Random
from typing import Any, ClassVar

from nanotrain_core.errors import Exit
from nanotrain_core.testing.chaos.bench import Trial
from nanotrain_core.testing.chaos.row import RESUME, Row, expect, save_step, some_rank, some_step


class Terminate(Row):
    """SIGTERM; the run saves, exits with 75, and resumes when it is restarted."""

    lost = 0
    order: ClassVar[dict[str, Any]] = {"act": "sleep", "amount": 1.0}
    at: ClassVar[str] = "step"

    def when(self, trial: Trial, random: Random) -> int:
        return some_step(trial, random)

    def signal(self, launcher: int) -> None:
        """Send the signal."""

        os.kill(launcher, signal.SIGTERM)

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        order = {
            **self.order,
            "at": self.at,
            "step": self.when(trial, random),
            "rank": some_rank(trial, random),
        }
        yield from expect(trial.launch(order=order, on_fault=self.signal), Exit.PREEMPTED)
        yield from expect(trial.launch(words=RESUME), Exit.DONE)


class TerminateLauncher(Terminate):
    number, name, short = "9", "SIGTERM to the launcher", True


class TerminateRank(Terminate):
    number, name = "9", "SIGTERM to one rank only"
    order: ClassVar[dict[str, Any]] = {"act": "terminate"}

    def signal(self, launcher: int) -> None:
        """The rank has sent it to itself."""


class TerminateInData(Terminate):
    number, name, at = "10", "SIGTERM while waiting for data", "data"


class TerminateInEvaluation(Terminate):
    number, name, at = "10", "SIGTERM during evaluation", "evaluation"

    def when(self, trial: Trial, random: Random) -> int:
        return save_step(trial, random)  # evaluations are as frequent


class TerminateInSave(Terminate):
    number, name = "10", "SIGTERM during a save"
    order: ClassVar[dict[str, Any]] = {"act": "write:signal", "amount": 3}

    def when(self, trial: Trial, random: Random) -> int:
        return save_step(trial, random)

    def hurt(self, trial: Trial, random: Random) -> Iterator[str]:
        order = {**self.order, "step": self.when(trial, random), "rank": 0}
        yield from expect(trial.launch(order=order, on_fault=self.signal), Exit.PREEMPTED)
        yield from expect(trial.launch(words=RESUME), Exit.DONE)


class TerminateAtStart(Terminate):
    number, name, at = "10", "SIGTERM before the first step", "start"

    def when(self, trial: Trial, random: Random) -> int:
        return 0


class TerminateTwice(Terminate):
    number, name, lost = "11", "two SIGTERMs", 1
    order: ClassVar[dict[str, Any]] = {"act": "sleep", "amount": 60.0}

    def signal(self, launcher: int) -> None:
        """Send both, while a rank sleeps."""
        super().signal(launcher)
        time.sleep(2.0)  # within a second it would count as one
        super().signal(launcher)
