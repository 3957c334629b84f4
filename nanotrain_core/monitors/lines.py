"""A step as a line: ``key=value`` pairs for programs and files, or a row under columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from nanotrain_core.contracts import StepReport

#: Columns of a table and their widths.
COLUMNS = {"step": 13, "loss": 8, "grad_norm": 9, "lr": 8, "tokens/s": 9, "ms/step": 7}


class SinceLine:
    """Means over the steps since the last line: a report has those since the last report."""

    def __init__(self, step: int) -> None:
        """``step``: the last step that a line showed."""
        self.begun = self.step = step
        self.seconds = self.tokens = self.flops = 0.0

    def add(self, report: StepReport) -> None:
        """Add a report."""
        seconds = report.seconds * (report.step - self.step)
        self.seconds += seconds
        tokens = seconds * report.tokens_per_second
        self.tokens += tokens
        self.flops += tokens * report.flops_per_token
        self.step = report.step

    def mean(self, report: StepReport) -> StepReport:
        """Return the newest report with the means over all these steps."""
        if self.seconds <= 0:
            return report
        each, pace = self.seconds / (self.step - self.begun), self.tokens / self.seconds
        flops = self.flops / self.tokens if self.tokens else report.flops_per_token
        return attrs.evolve(report, seconds=each, tokens_per_second=pace, flops_per_token=flops)


def step_fields(report: StepReport, steps: int, mfu: float | None = None) -> dict[str, Any]:
    """Return the fields of a step's line, in order."""
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
    """Align fields with :data:`COLUMNS`; fields without a column are appended as ``key=value``."""
    cells = [f"{fields.get(name, ''):>{width}}" for name, width in COLUMNS.items()]
    rest = pairs({key: value for key, value in fields.items() if key not in COLUMNS})
    return "  ".join([*cells, rest]).rstrip()
