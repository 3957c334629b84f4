"""The ``console`` monitor: what a person sees of a run, on rank 0's standard output."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from nanotrain_core.builtin.configs import ConsoleConfig
from nanotrain_core.contracts import (
    CheckpointReport,
    EndReport,
    EvaluationReport,
    MetricsReport,
    Monitor,
    RollbackReport,
    RunInfo,
    StepReport,
)
from nanotrain_core.run.throughput import peak_flops

#: Columns of a table and their widths.
COLUMNS = {"step": 13, "loss": 8, "grad_norm": 9, "lr": 8, "tokens/s": 9, "ms/step": 7}


class Console(Monitor):
    """One live line on a terminal, plain ``key=value`` lines in a file or a pipe."""

    reads_weights = False

    def __init__(self, config: ConsoleConfig) -> None:
        self.config = config
        self.live: Live | None = None

    def on_start(self, run: RunInfo) -> None:
        """Print what is about to run."""
        self.run, self.shown = run, run.rank == 0
        if not self.shown:
            return
        ranks = f"{run.world_size} rank{'s' if run.world_size > 1 else ''} on {run.device.type}"
        self._line(
            f"{run.name}: {run.parameters:,} parameters, {ranks}, {run.tokens_per_step:,} tokens a step"
        )
        described = getattr(run.data, "describe", None)  # a script's loader has none
        if described is not None:
            self._line(described())
        for line in run.described:
            self._line(line)
        self.peak = peak_of(run.device) if run.flops_per_token else None
        if self.peak:
            self._line(
                f"MFU is of {self.peak / 1e12:,.0f} TFLOP/s a rank: dense bfloat16, {device_name(run.device)}"
            )
        if run.folder is not None:
            self._line(f"run folder {run.folder}")
        if run.first_step:
            self._line(f"resumed after step {run.first_step}")
        if self.config.style == "table":
            self._line("  ".join(f"{name:>{width}}" for name, width in COLUMNS.items()))
        elif self.config.style == "auto" and sys.stdout.isatty():
            self.live = Live(console=RichConsole(highlight=False, soft_wrap=True), auto_refresh=False)
            self.live.start()

    def on_step(self, report: StepReport) -> None:
        """Show one step."""
        if not self.shown:
            return
        mfu = None
        if self.peak:
            flops = self.run.flops_per_token * report.tokens_per_second
            mfu = flops / (self.peak * self.run.world_size)
        fields = step_fields(report, self.run.steps, mfu)
        if self.live is not None:
            self.live.update(Text(pairs(fields)), refresh=True)
        elif self._due(report.step):
            self._line(row(fields) if self.config.style == "table" else pairs(fields))

    def on_metrics(self, report: MetricsReport) -> None:
        """Show the published metrics that are asked for."""
        wanted = [name for name in sorted(report.published) if name in report.values and self._asked(name)]
        if wanted and self._due(report.step):
            fields = {name: f"{report.values[name]:.4g}" for name in wanted}
            self._line(pairs({"step": report.step, **fields}))

    def _due(self, step: int) -> bool:
        return step % self.config.every == 0 or step == self.run.steps

    def _asked(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.config.metrics)

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

    def on_rollback(self, report: RollbackReport) -> None:
        """Show where the run went back to."""
        fields = {"step": report.step, "rollback_to": report.restored, "because": report.reason}
        self._line(pairs({**fields, "skipped_sequences": "{}-{}".format(*report.skipped)}))

    def on_end(self, report: EndReport) -> None:
        """Print how it ended."""
        if self.live is not None:
            self.live.stop()
            self.live = None
        self._line(f"{report.reason} after step {report.step}, {report.tokens:,} tokens")

    def _line(self, text: str) -> None:
        if not self.shown:
            return
        if self.live is not None:
            self.live.console.print(text, markup=False)
            return
        try:
            print(text, flush=True)
        except BrokenPipeError:  # whoever read along, such as `head`, has seen enough
            self.shown = False


def device_name(device: torch.device) -> str:
    """Return what a GPU calls itself; empty for any other device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def peak_of(device: torch.device) -> float | None:
    """Return the FLOP/s that MFU is a share of, None where they are not known."""
    return peak_flops(device_name(device))


def step_fields(report: StepReport, steps: int, mfu: float | None = None) -> dict[str, Any]:
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
    if mfu is not None:
        fields["mfu"] = f"{mfu:.1%}"
    if report.expert_load is not None:
        fields["expert_load"] = f"{report.expert_load:.2f}"
    if report.bubble is not None:
        fields["bubble"] = f"{report.bubble:.0%}"
    if report.skipped or report.loss_scale != 1.0:
        fields["loss_scale"] = f"{report.loss_scale:g}"
    if report.skipped:
        fields["skipped"] = "overflow"
    return fields


def pairs(fields: Mapping[str, Any]) -> str:
    """Join fields as ``key=value``."""
    return " ".join(f"{key}={value}" for key, value in fields.items())


def row(fields: Mapping[str, Any]) -> str:
    """Line fields up under :data:`COLUMNS`; what has no column is appended as ``key=value``."""
    cells = [f"{fields.get(name, ''):>{width}}" for name, width in COLUMNS.items()]
    rest = pairs({key: value for key, value in fields.items() if key not in COLUMNS})
    return "  ".join([*cells, rest]).rstrip()
