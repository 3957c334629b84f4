"""Adds the metrics that a monitor derives from those of a report."""

from __future__ import annotations

from collections.abc import Mapping

from nanotrain_core.contracts import MetricsReport, Monitor
from nanotrain_core.errors import PluginError
from nanotrain_core.metrics.declared import Metric, Names


def with_derived(
    report: MetricsReport, monitor: Monitor, values: Mapping[str, float], names: Names
) -> MetricsReport:
    """Return ``report`` with the metrics that a monitor derived from it; ``names`` are its declared metrics.

    Raises:
        PluginError: the monitor does not declare a name, or the report already has it.
    """
    if not values:
        return report
    found: dict[str, Metric] = {}
    for name in values:
        metric = names.find(name)
        if name in report.values or metric is None:
            why = "which the step has already" if name in report.values else "which it does not declare"
            raise PluginError(
                f"{type(monitor).__name__} derives the metric '{name}', {why}{names.near(name)}"
            )
        found[name] = metric
    return MetricsReport(
        step=report.step,
        values={**report.values, **values},
        histograms=report.histograms,
        texts=report.texts,
        metrics={**report.metrics, **found},
        failed=report.failed,
        published=report.published | values.keys(),
    )
