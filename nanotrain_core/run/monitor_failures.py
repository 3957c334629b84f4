"""Handles what monitors raise: logged once in full, then counted; raised where the run must end."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import structlog

from nanotrain_core.contracts import Monitor
from nanotrain_core.errors import NanotrainError, describe
from nanotrain_core.run.log import record
from nanotrain_core.run.monitor_collectives import FailedElsewhere


class MonitorFailures:
    """The failures of a run's monitors, on one rank."""

    def __init__(self, *, strict: bool) -> None:
        """``strict``: raise every failure, which ends the run (``run.strict_monitors``)."""
        self.strict = strict
        self.log = structlog.get_logger("nanotrain.monitor")
        self._times: Counter[tuple[str, str]] = Counter()
        """How often each problem occurred, by where it did and its text without numbers."""

    def handle(self, monitor: Monitor, event: str, problem: Exception) -> None:
        """Log an exception of a monitor in ``event``.

        Raises:
            Exception: ``problem`` itself, if the run is strict or it is a :class:`NanotrainError`, by which a
                monitor ends the run.
        """
        what = f"{type(monitor).__name__}.{event}"
        if isinstance(problem, FailedElsewhere):
            if self.strict:
                raise NanotrainError(f"the monitor in {what}: {problem}") from None
            text = "a monitor's event was ended: it failed on another rank"
            self.warn(what, text, str(problem), monitor=what, why=str(problem))
            return
        if self.strict or isinstance(problem, NanotrainError):
            raise problem
        text = "a monitor failed and the run goes on"
        if self._is_repeated(what, describe(problem)):
            record("error", text, monitor=what, error=describe(problem))
        else:
            self.log.exception(text, monitor=what)

    def warn(self, what: str, text: str, problem: str = "", **fields: Any) -> None:
        """Log a warning, from the second one of the same problem on only in the log's file."""
        if self._is_repeated(what, problem):
            record("warning", text, **fields)
        else:
            self.log.warning(text, **fields)

    def _is_repeated(self, what: str, problem: str) -> bool:
        """Count a problem; return whether it was logged before, ignoring numbers in its text."""
        key = what, re.sub(r"\d+", "0", problem)
        self._times[key] += 1
        return self._times[key] > 1

    def log_repetitions(self) -> None:
        """Log, at the end of the run, how often problems that were logged once have occurred."""
        for (what, _), times in self._times.items():
            if times > 1:
                self.log.warning("a monitor failed again in the same way", monitor=what, times=times - 1)
        self._times.clear()
