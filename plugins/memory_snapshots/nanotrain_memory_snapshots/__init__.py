"""Snapshots of a run's state in host memory, at every step and in two places: a restart needs no checkpoint.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.

Source of the idea: Wang et al., "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory
Checkpoints", SOSP 2023.
"""

from collections.abc import Iterator
from pathlib import Path

import attrs

from nanotrain_core.api import (
    Component,
    Layout,
    Metric,
    Problem,
    Range,
    Recipe,
    Register,
    hookimpl,
)

__version__ = "0.1.0"


@attrs.define(frozen=True, kw_only=True)
class MemorySnapshotsConfig:
    """``[[monitor]] use = "memory_snapshots"``. Takes effect if `run.max_restarts` is above 0."""

    every: int = attrs.field(default=1, validator=Range(1))
    """Steps between two snapshots: at most this many steps are lost when ranks are restarted."""
    keep: int = attrs.field(default=2, validator=Range(2, 16))
    """Number of newest snapshots that each rank keeps. There is memory for one more, which is being
    written."""
    neighbor: bool = True
    """Also keep each rank's snapshots at another rank, on another host if there are several: without it,
    the snapshots of a lost host are lost. Twice the memory."""
    folder: str = "/dev/shm"
    """Folder of the snapshots on every host: in an in-memory file system, whose files outlive processes."""


METRICS = (
    Metric(
        name="snapshots/seconds",
        unit="s",
        group="reliability",
        reduce="max",
        summary="time until the last memory snapshot was sealed here and at the neighbor, slowest rank",
    ),
    Metric(
        name="snapshots/blocked",
        unit="s",
        group="reliability",
        reduce="max",
        summary="time for which the last step's update waited for its memory snapshot, slowest rank",
    ),
    Metric(
        name="recovery/steps_lost",
        unit="1",
        group="reliability",
        reduce="max",
        summary="steps repeated after the last restart that resumed from memory snapshots",
    ),
    Metric(
        name="recovery/from_neighbors",
        unit="1",
        group="reliability",
        reduce="max",
        summary="ranks whose neighbor's copy of the memory snapshot was needed at that restart",
    ),
)


def check_snapshots(recipe: Recipe, config: MemorySnapshotsConfig, layout: Layout) -> Iterator[Problem]:
    """Reject a value that is not a folder, and a second monitor of this kind."""
    others = [n for n, each in enumerate(recipe.monitor) if each.use == "memory_snapshots"]
    if not Path(config.folder).is_absolute() or "\0" in config.folder:
        shown = repr(config.folder[:200])
        yield Problem(f"monitor.{others[0]}.folder", f"{shown} is no path that begins with /; expected one")
    if len(others) > 1:
        yield Problem(f"monitor.{others[1]}", "a run keeps memory snapshots once; expected one such monitor")


@hookimpl
def nanotrain_register_monitor(register: Register) -> None:
    """Register ``memory_snapshots``."""
    register(
        Component(
            name="memory_snapshots",
            config=MemorySnapshotsConfig,
            factory="nanotrain_memory_snapshots.monitor:MemorySnapshots",
            summary="keeps every step's state in the memory of two hosts, for restarted ranks",
            metrics=METRICS,
            check=check_snapshots,
        )
    )
