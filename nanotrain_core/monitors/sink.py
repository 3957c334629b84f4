"""The base class of sinks: monitors that hand metrics on to another program, on rank 0, from a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from nanotrain_core.contracts import EndReport, MetricsReport, Monitor, RollbackReport, RunInfo
from nanotrain_core.monitors.sink_queue import SinkQueue


class Sink(Monitor):
    """Calls ``open``, ``write``, ``rolled_back`` and ``finish`` on rank 0, in order, in a thread of its own.

    A sink writes these four and leaves the events of :class:`Monitor` alone. They may take as long as they
    like and raise what they like: no step waits for them, and no run fails with them. A report that finds no
    place in the queue of :attr:`waiting` is dropped, and counted. If ``open`` fails the sink is off.
    """

    reads_weights = False

    waiting: int = 1024
    """Reports that may wait."""
    patience: float = 10.0
    """Seconds that the end of a run waits for what is not yet written."""

    queue: SinkQueue | None = None
    _on: bool = False

    def open(self, run: RunInfo) -> None:
        """Begin, or go on where ``run.first_step`` is above 0: what was written after it counts no more."""

    def write(self, report: MetricsReport) -> None:
        """Take the metrics of a step, an evaluation or a checkpoint; steps ascend until a rollback."""

    def rolled_back(self, report: RollbackReport) -> None:
        """Learn that what was written after step ``report.restored`` counts no more."""

    def finish(self, report: EndReport) -> None:
        """Write what is left and close."""

    # --- how they are called ----------------------------------------------------------------

    def on_start(self, run: RunInfo) -> None:
        """Open in the thread: a server may keep it waiting."""
        if run.rank == 0:
            self.queue = SinkQueue(type(self).__name__.lower(), size=self.waiting)
            self.queue.put(self._open, run, must=True)

    def on_metrics(self, report: MetricsReport) -> None:
        """Queue a report."""
        self.later(self.write, report)

    def on_rollback(self, report: RollbackReport) -> None:
        """Queue the seam, which is never dropped."""
        self.later(self.rolled_back, report, must=True)

    def on_end(self, report: EndReport) -> None:
        """Write what waits, for :attr:`patience` seconds at most."""
        if self.queue is not None:
            self.later(self.finish, report, must=True)
            self.queue.close(self.patience)
            self.queue = None

    def later(self, call: Callable[..., None], report: Any, *, must: bool = False) -> None:
        """Have ``call(report)`` called in the thread: for events that :class:`Sink` has no method for."""
        if self.queue is not None:
            self.queue.put(self._if_on, call, report, must=must)

    def _open(self, run: RunInfo) -> None:
        self._on = False
        try:
            self.open(run)
            self._on = True
        except Exception:
            text = "a sink could not begin: the run goes on without it"
            structlog.get_logger("nanotrain.monitor").exception(text, sink=type(self).__name__.lower())

    def _if_on(self, call: Callable[..., None], report: Any) -> None:
        if self._on:
            call(report)
