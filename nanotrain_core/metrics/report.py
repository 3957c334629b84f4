"""The metrics that sinks receive: values that are global and equal on every rank, with their declarations."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from nanotrain_core.metrics.declared import Metric


@attrs.define(frozen=True)
class Histogram:
    """The distribution of a tensor's elements over all ranks."""

    edges: tuple[float, ...]
    """Edges of the bins, ascending: one more than ``counts``."""
    counts: tuple[float, ...]
    below: float
    above: float
    """Counts below the first and above the last edge, infinities included."""
    nan: float


@attrs.define(frozen=True)
class MetricsReport:
    """The metrics of one step, including the core's. Equal on every rank except times."""

    step: int
    values: Mapping[str, float]
    histograms: Mapping[str, Histogram] = attrs.field(factory=dict)
    texts: Mapping[str, str] = attrs.field(factory=dict)
    metrics: Mapping[str, Metric] = attrs.field(factory=dict, repr=False)
    """The declaration of every name above: unit, group, rule."""
    failed: Mapping[str, int] = attrs.field(factory=dict)
    """Monitors that failed since the last logged step, each with a rank on which it did. What they published
    since then is omitted: ranks may have published different parts of it."""
    published: frozenset[str] = frozenset()
    """Which of these names were published by monitors; the others are also in the report of a step, an
    evaluation or a checkpoint."""
