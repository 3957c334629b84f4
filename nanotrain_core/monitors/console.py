"""The ``console`` monitor: a run's progress for people, on rank 0's standard output."""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

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
from nanotrain_core.monitors.lines import COLUMNS, SinceLine, pairs, row, step_fields
from nanotrain_core.monitors.panel import Panel
from nanotrain_core.monitors.terminal import Screen
from nanotrain_core.run.progress_bar import is_live
from nanotrain_core.run.throughput import peak_flops

#: Published texts that the panel shows: ``health``, and others below it, such as that of a slow rank.
HEALTH = "health/"


class Console(Monitor):
    """A panel at the bottom of a terminal, plain ``key=value`` lines in a file or a pipe."""

    reads_weights = False

    def __init__(self, config: ConsoleConfig) -> None:
        self.config = config
        self.panel: Panel | None = None
        self.screen: Screen | None = None

    def on_start(self, run: RunInfo) -> None:
        """Print a description of the run."""
        self.run, self.shown = run, run.rank == 0
        self.since = SinceLine(run.first_step)
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
        elif self.config.style == "auto" and is_live(sys.stdout):
            self._show_panel(run)

    def _show_panel(self, run: RunInfo) -> None:
        self.panel = Panel(
            run.name,
            run.steps,
            run.first_step,
            phase=lambda: run.progress.phase,
            memory=lambda: memory_of(run.device),
        )
        panel = self.panel
        self.screen = Screen(lambda width, height, plain: panel.lines(width, height, ascii_only=plain))
        self.screen.start()

    def on_step(self, report: StepReport) -> None:
        """Show one step."""
        if not self.shown:
            return
        self.since.add(report)
        if self.panel is None and not self._due(report.step):
            return
        report, self.since = self.since.mean(report), SinceLine(report.step)
        mfu = None
        if self.peak:
            flops_per_token = report.flops_per_token or self.run.flops_per_token
            mfu = flops_per_token * report.tokens_per_second / (self.peak * self.run.world_size)
        fields = step_fields(report, self.run.steps, mfu)
        if self.panel is not None:
            self.panel.step(report, fields)
        else:
            self._line(row(fields) if self.config.style == "table" else pairs(fields))

    def on_metrics(self, report: MetricsReport) -> None:
        """Show the published metrics that are requested, and on a terminal the monitors' health reports."""
        said = [text for name, text in report.texts.items() if f"{name}/".startswith(HEALTH)]
        if self.panel is not None and said:
            self.panel.health = " ".join(said)
        wanted = [name for name in sorted(report.published) if name in report.values and self._asked(name)]
        if wanted and self._due(report.step):
            fields = {name: f"{report.values[name]:.4g}" for name in wanted}
            if self.panel is not None:
                self.panel.asked = fields
            else:
                self._line(pairs({"step": report.step, **fields}))

    def _due(self, step: int) -> bool:
        return step % self.config.every == 0 or step == self.run.steps

    def _asked(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.config.metrics)

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Show a validation loss."""
        if self.panel is not None:
            self.panel.evaluated(report)
        fields: dict[str, Any] = {"step": report.step, "validation_loss": f"{report.loss:.4f}"}
        if report.bits_per_byte is not None:
            fields["bits_per_byte"] = f"{report.bits_per_byte:.4f}"
        fields |= {f"validation_{n}": f"{v:.4f}" for n, v in report.losses.items() if n != "lm"}
        self._line(pairs(fields))

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """Show where a checkpoint was saved."""
        if self.panel is not None:
            self.panel.saved_now(report.step)
            return
        self._line(
            pairs({"step": report.step, "checkpoint": report.path, "seconds": f"{report.seconds:.2f}"})
        )

    def on_rollback(self, report: RollbackReport) -> None:
        """Show where the run rolled back to."""
        self.since = SinceLine(report.restored)
        if self.panel is not None:
            self.panel.rolled_back()
        fields = {"step": report.step, "rollback_to": report.restored, "because": report.reason}
        self._line(pairs({**fields, "skipped_sequences": "{}-{}".format(*report.skipped)}))

    def on_end(self, report: EndReport) -> None:
        """Print how it ended."""
        if self.screen is not None and self.panel is not None:
            self.panel.over = report.reason
            self.screen.stop()
            self.screen = self.panel = None
        self._line(f"{report.reason} after step {report.step}, {report.tokens:,} tokens")

    def _line(self, text: str) -> None:
        if not self.shown:
            return
        if self.screen is not None:
            self.screen.print(text)
            return
        try:
            print(text, flush=True)
        except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
            self.shown = False


def device_name(device: torch.device) -> str:
    """Return the name of a GPU; empty for any other device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def peak_of(device: torch.device) -> float | None:
    """Return the peak FLOP/s for MFU, None where they are not known."""
    return peak_flops(device_name(device))


def memory_of(device: torch.device) -> str:
    """Return the memory of this process: on a GPU what torch has reserved, elsewhere the host's."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return f"memory {torch.cuda.memory_reserved(device) / 1e9:.1f} of {total / 1e9:.0f} GB"
    status = Path("/proc/self/status")
    if not status.is_file():
        return ""
    held = next((line for line in status.read_text().splitlines() if line.startswith("VmRSS:")), "")
    return f"memory {int(held.split()[1]) / 1e6:.1f} GB" if held else ""
