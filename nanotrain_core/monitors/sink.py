"""The base class of sinks: monitors that send metrics to another program, on rank 0, from a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from nanotrain_core.contracts import EndReport, MetricsReport, Monitor, RollbackReport, RunInfo
from nanotrain_core.monitors.sink_queue import SinkQueue


class Sink(Monitor):
    """Calls ``open``, ``write``, ``rolled_back`` and ``finish`` on rank 0, in order, in a separate thread.

    A sink implements these four and does not override the events of :class:`Monitor`. They may take any time
    and raise any exception: no step waits for them, and no run fails because of them. A report that does not
    fit into the queue of size :attr:`waiting` is dropped and counted. If ``open`` fails the sink is disabled.
    """

    reads_weights = False

    waiting: int = 1024
    """Maximum number of queued reports."""
    patience: float = 10.0
    """Seconds that the end of a run waits for queued reports."""

    queue: SinkQueue | None = None
    _on: bool = False

    def open(self, run: RunInfo) -> None:
        """Begin, or continue where ``run.first_step`` is above 0: anything written after it is obsolete."""

    def write(self, report: MetricsReport) -> None:
        """Write the metrics of a step, an evaluation or a checkpoint; steps ascend until a rollback."""

    def rolled_back(self, report: RollbackReport) -> None:
        """Handle a rollback: what was written after step ``report.restored`` is obsolete."""

    def finish(self, report: EndReport) -> None:
        """Write what is left and close."""

    # --- how they are called ----------------------------------------------------------------

    def on_start(self, run: RunInfo) -> None:
        """Open in the thread: a server may make it wait."""
        if run.rank == 0:
            self.queue = SinkQueue(type(self).__name__.lower(), size=self.waiting)
            self.queue.put(self._open, run, must=True)

    def on_metrics(self, report: MetricsReport) -> None:
        """Queue a report."""
        self.later(self.write, report)

    def on_rollback(self, report: RollbackReport) -> None:
        """Queue the rollback, which is never dropped."""
        self.later(self.rolled_back, report, must=True)

    def on_end(self, report: EndReport) -> None:
        """Write what is queued, for at most :attr:`patience` seconds."""
        if self.queue is not None:
            self.later(self.finish, report, must=True)
            self.queue.close(self.patience)
            self.queue = None

    def later(self, call: Callable[..., None], report: Any, *, must: bool = False) -> None:
        """Call ``call(report)`` in the thread: for events without a method in :class:`Sink`."""
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
