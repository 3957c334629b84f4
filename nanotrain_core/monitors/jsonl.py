"""The ``jsonl`` monitor: every report as a line of ``metrics.jsonl``, the run's metrics file."""

from __future__ import annotations

import time
from typing import Any

import attrs

from nanotrain_core.builtin.configs import JsonlConfig
from nanotrain_core.contracts import (
    CheckpointReport,
    EndReport,
    EvaluationReport,
    FailedSaveReport,
    MetricsReport,
    Monitor,
    RollbackReport,
    RunInfo,
    StepReport,
)
from nanotrain_core.metrics.declared import describe
from nanotrain_core.metrics.history import FILE, last_attempt
from nanotrain_core.run.files import LineFile
from nanotrain_core.run.plain_json import json_text


class Jsonl(Monitor):
    """Appends to the file of the run folder, on rank 0.

    Each row has ``event``, ``time`` (seconds since 1970), ``attempt`` and the report's fields. A run that is
    resumed or rolled back appends, with the next attempt number:
    :func:`nanotrain_core.metrics.history.read_metrics` reconstructs curves from them.

    Rows are written within their step, not by a thread: a run that is killed in the next step has
    all of them in its file. A row costs one write to the system's page cache.
    """

    reads_weights = False

    def __init__(self, config: JsonlConfig) -> None:
        del config  # it has no keys
        self.file: LineFile | None = None
        self.attempt = 0

    def on_start(self, run: RunInfo) -> None:
        """Open the file and describe the run."""
        if run.rank == 0 and run.folder is not None:
            path = run.folder / FILE
            self.attempt = last_attempt(path) + 1
            self.file = LineFile(path)
        self._row(
            "start",
            {
                "name": run.name,
                "steps": run.steps,
                "first_step": run.first_step,
                "world_size": run.world_size,
                "device": str(run.device),
                "parameters": run.parameters,
                "tokens_per_step": run.tokens_per_step,
                "flops_per_token": run.flops_per_token,
            },
        )
        if run.declared:
            self._row("declared", {"metrics": [describe(metric) for metric in run.declared]})

    def on_step(self, report: StepReport) -> None:
        """Write a step."""
        self._row("step", attrs.asdict(report))

    def on_metrics(self, report: MetricsReport) -> None:
        """Write what monitors published; the core's metrics are in the rows of their own reports."""
        if report.published:
            fields = {
                "values": {name: x for name, x in report.values.items() if name in report.published},
                "histograms": {name: attrs.asdict(each) for name, each in report.histograms.items()},
                "texts": dict(report.texts),
            }
            found = {key: value for key, value in fields.items() if value}
            self._row("metrics", {"step": report.step, **found})

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Write a validation loss."""
        self._row("evaluation", attrs.asdict(report))

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """Write a checkpoint's location."""
        table = attrs.asdict(report)
        del table["written"]  # only rank 0's
        self._row("checkpoint", table)

    def on_save_failed(self, report: FailedSaveReport) -> None:
        """Write which checkpoint is missing, and why."""
        self._row("save_failed", attrs.asdict(report))

    def on_rollback(self, report: RollbackReport) -> None:
        """Write where the run rolled back to, and which data it skips."""
        self.attempt += 1
        self._row("rollback", attrs.asdict(report))

    def on_end(self, report: EndReport) -> None:
        """Write how it ended and close."""
        self._row("end", attrs.asdict(report))
        if self.file is not None:
            self.file.close()
            self.file = None

    def _row(self, event: str, fields: dict[str, Any]) -> None:
        if self.file is not None:
            row = {"event": event, "time": time.time(), "attempt": self.attempt, **fields}
            self.file.append(json_text(row))
