"""The ``console`` monitor: what a person sees of a run, on rank 0's standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from nanotrain_core.builtin.configs import ConsoleConfig
from nanotrain_core.contracts import (
    CheckpointReport,
    EndReport,
    EvaluationReport,
    Monitor,
    RunInfo,
    StepReport,
)


class Console(Monitor):
    """One live line on a terminal, plain ``key=value`` lines in a file or a pipe."""

    def __init__(self, config: ConsoleConfig) -> None:
        self.config = config
        self.live: Live | None = None

    def on_start(self, run: RunInfo) -> None:
        """Say what is about to run."""
        self.run, self.shown = run, run.rank == 0
        if not self.shown:
            return
        self.console = RichConsole(file=sys.stdout, highlight=False, soft_wrap=True)
        ranks = f"{run.world_size} rank{'s' if run.world_size > 1 else ''} on {run.device.type}"
        self._line(
            f"{run.name}: {run.parameters:,} parameters, {ranks}, {run.tokens_per_step:,} tokens a step"
        )
        described = getattr(run.data, "describe", None)
        if described is not None:
            self._line(described())
        if run.folder is not None:
            self._line(f"run folder {run.folder}")
        if run.first_step:
            self._line(f"resumed after step {run.first_step}")
        if self.console.is_terminal and "CI" not in os.environ:
            self.live = Live(console=self.console, auto_refresh=False)
            self.live.start()

    def on_step(self, report: StepReport) -> None:
        """Show one step."""
        if not self.shown:
            return
        fields = step_fields(report, self.run.steps)
        if self.live is not None:
            self.live.update(Text(pairs(fields)), refresh=True)
        elif report.step % self.config.every == 0 or report.step == self.run.steps:
            self._line(pairs(fields))

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Show a validation loss."""
        fields: dict[str, Any] = {"step": report.step, "validation_loss": f"{report.loss:.4f}"}
        if report.bits_per_byte is not None:
            fields["bits_per_byte"] = f"{report.bits_per_byte:.4f}"
        self._line(pairs(fields))

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """Show where a checkpoint went."""
        self._line(
            pairs({"step": report.step, "checkpoint": report.path, "seconds": f"{report.seconds:.2f}"})
        )

    def on_end(self, report: EndReport) -> None:
        """Say how it ended."""
        if self.live is not None:
            self.live.stop()
        self._line(f"{report.reason} after step {report.step}, {report.tokens:,} tokens")

    def _line(self, text: str) -> None:
        if self.shown:
            self.console.print(text, markup=False)


def step_fields(report: StepReport, steps: int) -> dict[str, Any]:
    """Return what a step's line shows, in order."""
    fields: dict[str, Any] = {"step": f"{report.step}/{steps}", "loss": f"{report.loss:.4f}"}
    if len(report.losses) > 1:
        fields.update({name: f"{value:.4f}" for name, value in report.losses.items()})
    fields |= {
        "grad_norm": f"{report.grad_norm:.3f}",
        "lr": f"{report.lr:.2e}",
        "tokens/s": f"{report.tokens_per_second:,.0f}".replace(",", "_"),
        "ms/step": f"{report.seconds * 1000:.0f}",
    }
    if report.skipped or report.loss_scale != 1.0:
        fields["loss_scale"] = f"{report.loss_scale:g}"
    if report.skipped:
        fields["skipped"] = "overflow"
    return fields


def pairs(fields: Mapping[str, Any]) -> str:
    """Join fields as ``key=value``."""
    return " ".join(f"{key}={value}" for key, value in fields.items())
