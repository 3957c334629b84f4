"""The ``tensorboard`` monitor: event files that TensorBoard reads, written by torch's own writer."""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import attrs
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from nanotrain_core.api import PluginError, flat_settings, run_settings
from nanotrain_core.api.torch import EndReport, Histogram, MetricsReport, RollbackReport, RunInfo, Sink
from nanotrain_tensorboard import TensorBoardConfig

#: What TensorBoard's table of hyperparameters has a column for.
COMPARED = ("loss", "validation/loss")

#: The text that says where a run was resumed or rolled back.
SEAM = "run/seam"


class TensorBoard(Sink):
    """Writes every metric under its own name, at its own step.

    TensorBoard stores values as float32. A resumed run continues in the same folder, in a new file. Values of
    later steps, which the previous attempt has written, are purged from the curves, as after a rollback, and
    the text ``run/seam`` records it.
    """

    def __init__(self, config: TensorBoardConfig) -> None:
        self.config = config

    def open(self, run: RunInfo) -> None:
        """Begin a file of events, and tell settings."""
        if self.config.folder is None and run.folder is None:
            raise PluginError("'tensorboard' has no folder to write to: this run has none; give it `folder`")
        folder = Path(self.config.folder) if self.config.folder else Path(str(run.folder), "tensorboard")
        goes_on = any(folder.glob("events.out.tfevents.*"))
        self.writer = SummaryWriter(str(folder), flush_secs=round(self.config.flush_seconds))
        self.file = cast(Any, self.writer.file_writer)
        settings = flat_settings(run_settings(run.recipe))
        begun, session, self.session_end = cast(Any, hparams)(settings, dict.fromkeys(COMPARED, 0.0))
        if goes_on:
            self._purge(run.first_step, f"resumed after step {run.first_step}")
        else:
            for summary in (begun, session):
                self.file.add_summary(summary)
        lines = [f"| `{key}` | {_cell(value)} |" for key, value in settings.items()]
        self.writer.add_text(
            "run/recipe", "\n".join(["| key | value |", "|---|---|", *lines]), run.first_step
        )

    def write(self, report: MetricsReport) -> None:
        """Write a step's metrics."""
        for name, value in report.values.items():
            if self._wanted(name):
                self.writer.add_scalar(name, value, report.step)
        for name, text in report.texts.items():
            if self._wanted(name):
                self.writer.add_text(name, text, report.step)
        for name, histogram in report.histograms.items() if self.config.histograms else ():
            if self._wanted(name):
                self.writer.add_histogram_raw(
                    name, **attrs.asdict(buckets(histogram)), global_step=report.step
                )
                if histogram.nan:
                    self.writer.add_scalar(f"{name}/nan", histogram.nan, report.step)

    def rolled_back(self, report: RollbackReport) -> None:
        """Purge the steps that were given up."""
        why = f"rolled back from step {report.step} to step {report.restored}: {report.reason}"
        self._purge(report.restored, why)

    def finish(self, report: EndReport) -> None:
        """Close the file."""
        self.file.add_summary(self.session_end)
        self.writer.close()

    def _purge(self, step: int, why: str) -> None:
        """Have TensorBoard forget what was written after ``step``; of step 0, all there is."""
        first = step + 1 if step else 0
        self.file.add_event(Event(session_log=SessionLog(status=SessionLog.START)), first)
        self.writer.add_text(SEAM, why, first)

    def _wanted(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.config.metrics)


@attrs.define(frozen=True)
class Buckets:
    """A histogram as ``SummaryWriter.add_histogram_raw`` takes it."""

    min: float
    max: float
    num: float
    sum: float
    sum_squares: float
    bucket_limits: list[float]
    """The upper edge of each bucket."""
    bucket_counts: list[float]


def buckets(histogram: Histogram) -> Buckets:
    """Return our bins, with one more for what is below them and one for what is above, if there is any.

    ``sum`` and ``sum_squares`` are as if each value were in the middle of its bin.
    """
    edges, counts = histogram.edges, histogram.counts
    limits, filled = [*edges[1:]], [*counts]
    if histogram.below:
        limits, filled = [edges[0], *limits], [histogram.below, *filled]
    if histogram.above:
        limits, filled = [*limits, sys.float_info.max], [*filled, histogram.above]
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    weighed: list[Any] = [*zip(middles, counts, strict=True)]
    weighed += [(edges[0], histogram.below), (edges[-1], histogram.above)]
    return Buckets(
        min=edges[0],
        max=edges[-1],
        num=sum(filled),
        sum=sum(x * count for x, count in weighed),
        sum_squares=sum(x * x * count for x, count in weighed),
        bucket_limits=limits,
        bucket_counts=filled,
    )


def _cell(value: object) -> str:
    """Return a value as a cell of a Markdown table."""
    return str(value).replace("|", "\\|").replace("\n", " ")
