"""Monitors: metrics that they publish, sinks, stop requests, and time spent."""

from nanotrain_core.metrics.publish import Metrics
from nanotrain_core.metrics.report import Histogram
from nanotrain_core.monitors.replicas import hash_bits
from nanotrain_core.monitors.sink import Sink
from nanotrain_core.monitors.sink_queue import SinkQueue
from nanotrain_core.run.global_metrics import sum_over_data
from nanotrain_core.run.stop import Rollback, StopRequest
from nanotrain_core.watch.progress import TimeSpent

__all__ = [
    "Histogram",
    "Metrics",
    "Rollback",
    "Sink",
    "SinkQueue",
    "StopRequest",
    "TimeSpent",
    "hash_bits",
    "sum_over_data",
]
