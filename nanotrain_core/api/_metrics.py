"""Metrics: declarations, verdicts, and the history in `metrics.jsonl`."""

from nanotrain_core.metrics.baseline import BASELINE_COUNT, Baseline, is_relative
from nanotrain_core.metrics.core import CORE as CORE_METRICS
from nanotrain_core.metrics.declared import Bins, Metric, Rule, Verdict, rank_metrics
from nanotrain_core.metrics.declared import Names as MetricNames
from nanotrain_core.metrics.history import Continuation, Curve, History, read_metrics
from nanotrain_core.metrics.patience import PATIENCE, StepKind, is_judged, required_patience, step_kind

__all__ = [
    "BASELINE_COUNT",
    "CORE_METRICS",
    "PATIENCE",
    "Baseline",
    "Bins",
    "Continuation",
    "Curve",
    "History",
    "Metric",
    "MetricNames",
    "Rule",
    "StepKind",
    "Verdict",
    "is_judged",
    "is_relative",
    "rank_metrics",
    "read_metrics",
    "required_patience",
    "step_kind",
]
