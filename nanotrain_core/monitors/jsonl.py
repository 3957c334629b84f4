"""The ``jsonl`` monitor: every report as a line of ``metrics.jsonl``, the record of the run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import IO, Any

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


class Jsonl(Monitor):
    """Appends to the file of the run folder, on rank 0.

    Each row has ``event``, ``time`` (seconds since 1970) and the report's fields. A resumed run
    appends: where a step stands twice, the later row counts.
    """

    reads_weights = False

    def __init__(self, config: JsonlConfig) -> None:
        del config  # it has no keys
        self.file: IO[str] | None = None

    def on_start(self, run: RunInfo) -> None:
        """Open the file and describe the run."""
        if run.rank == 0 and run.folder is not None:
            self.file = open(run.folder / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115
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

    def on_step(self, report: StepReport) -> None:
        """Write a step."""
        self._row("step", attrs.asdict(report))

    def on_metrics(self, report: MetricsReport) -> None:
        """Write what monitors published; the core's metrics are in the rows of their own reports."""
        if report.published:
            fields = {
                "step": report.step,
                "values": {name: x for name, x in report.values.items() if name in report.published},
                "histograms": {name: attrs.asdict(each) for name, each in report.histograms.items()},
                "texts": dict(report.texts),
            }
            self._row("metrics", {key: value for key, value in fields.items() if value})

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Write a validation loss."""
        self._row("evaluation", attrs.asdict(report))

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """Write a checkpoint's place."""
        self._row("checkpoint", attrs.asdict(report))

    def on_save_failed(self, report: FailedSaveReport) -> None:
        """Write which checkpoint is not there, and why."""
        self._row("save_failed", attrs.asdict(report))

    def on_rollback(self, report: RollbackReport) -> None:
        """Write where the run went back to, and which data it leaves out."""
        self._row("rollback", attrs.asdict(report))

    def on_end(self, report: EndReport) -> None:
        """Write how it ended and close."""
        self._row("end", attrs.asdict(report))
        if self.file is not None:
            self.file.close()
            self.file = None

    def _row(self, event: str, fields: dict[str, Any]) -> None:
        if self.file is not None:
            row = {"event": event, "time": time.time(), **fields}
            self.file.write(json.dumps(row, default=_plain) + "\n")
            self.file.flush()


def _plain(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} does not belong into metrics.jsonl")
