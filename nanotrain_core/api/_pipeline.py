"""Schedules: actions, parts of a model, and the simulator."""

from nanotrain_core.pipeline.actions import Action, Costs, Part, parts_between
from nanotrain_core.pipeline.simulator import Durations, TimedAction, Timeline, dependencies, simulate

__all__ = [
    "Action",
    "Costs",
    "Durations",
    "Part",
    "TimedAction",
    "Timeline",
    "dependencies",
    "parts_between",
    "simulate",
]
