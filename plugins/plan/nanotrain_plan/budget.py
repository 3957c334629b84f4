"""Resources that a run needs in addition to its devices: disk space for checkpoints, and host memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from math import gcd
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from nanotrain_core.api import Recipe, Registry
from nanotrain_plan.hardware import Hardware
from nanotrain_plan.stages import Stages

if TYPE_CHECKING:
    from nanotrain_plan.dry.rank import RankStep
    from nanotrain_plan.phase_stages import HighestMemory

#: Resident bytes of a rank's Python with torch, without a device's context: measured with torch 2.13.
PROCESS = 1.2e9


@attrs.define(frozen=True, kw_only=True)
class Checkpoints:
    """The checkpoints of a whole run."""

    bytes: int
    """Size of one: weights, master weights and optimizer state, each block once."""
    seconds: float
    """Time to write one: by all nodes in parallel, or by the first node if it gathers the checkpoint."""
    later_bytes: int
    """Bytes that later ones write: less than :attr:`bytes` if the format links files of frozen weights."""
    later_seconds: float
    """Time to write them."""
    kept: int
    """Most that are on disk at once: ``keep``, one that is being written, and, if evaluations are rarer than
    saves, the newest one that an evaluation has followed."""
    disk: int
    """Bytes of all these. Frozen weights that are linked count twice: they are written anew at times."""
    free: int | None
    """Bytes free where this command runs, under the run folder."""


@attrs.define(frozen=True, kw_only=True)
class HostMemory:
    """Host memory in bytes of the node whose ranks take most; the first one may gather checkpoints."""

    ranks: int
    """Ranks on the node."""
    processes: int
    tensors: int
    """The ranks' own tensors at their peaks, if they compute on CPUs; else 0."""
    offloaded: int
    """Optimizer state that is kept on the host, and copies of weights from which devices read new ones."""
    activations: int
    """Activations that wait on the host for their backward pass."""
    checkpoint: int
    """A copy of what its ranks save, while they go on training, in which packed weights are packed; the whole
    checkpoint, unpacked, if it gathers that."""
    later_checkpoint: int
    """The same at later checkpoints, in :attr:`checkpoint` too: less if these link frozen weights."""
    available: int
    """What the hardware's nodes have."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.processes + self.tensors + self.offloaded + self.activations + self.checkpoint

    @property
    def fits(self) -> bool:
        """Whether a node has as much."""
        return self.total <= self.available


def checkpoints(recipe: Recipe, registry: Registry, stages: Stages, hardware: Hardware) -> Checkpoints:
    """Return what the run's checkpoints take."""
    size = checkpoint_bytes(stages)
    nodes = max(1.0, stages.layout.world_size / hardware.devices_per_node)  # of which one may be partly used
    if _gathers(recipe, registry):
        nodes = 1.0
    frozen = _of_all_ranks(stages, attrgetter("frozen")) if _links(recipe) else 0
    second = hardware.disk_gb_s * 1e9 * nodes
    keep = getattr(recipe.checkpoint.config, "keep", 1)
    kept = keep + 1 + _evaluated_lags(recipe, keep)
    folder = Path(recipe.run.folder or "runs").absolute()
    while not folder.exists():
        folder = folder.parent
    return Checkpoints(
        bytes=size,
        seconds=size / second,
        later_bytes=size - frozen,
        later_seconds=(size - frozen) / second,
        kept=kept,
        disk=(size - frozen) * kept + frozen * 2,
        free=shutil.disk_usage(folder).free,
    )


def _evaluated_lags(recipe: Recipe, keep: int) -> bool:
    """Return whether the newest evaluated checkpoint, which stays, can be older than the ``keep`` newest.

    An evaluation in the step of a save comes before it. So at a save the last one is at most
    ``evaluation.every``, less the greatest common divisor of the two periods, steps ago.
    """
    saves, evaluates = getattr(recipe.checkpoint.config, "every", 0), recipe.evaluation.every
    if not saves or not recipe.evaluation.sequences or not 0 < evaluates < recipe.run.steps:
        return False
    return evaluates - gcd(saves, evaluates) > (keep - 1) * saves


def checkpoint_bytes(stages: Stages) -> int:
    """Return :attr:`Checkpoints.bytes`."""
    return _of_all_ranks(stages, attrgetter("saved"))


def _of_all_ranks(stages: Stages, bytes_of: Callable[[RankStep], float]) -> int:
    alike = stages.layout.world_size // stages.pp
    return round(sum(bytes_of(stages.step_of(rank)) for rank in range(stages.pp)) * alike)


def _links(recipe: Recipe) -> bool:
    """Return whether later checkpoints link the frozen weights of earlier ones."""
    return bool(getattr(recipe.checkpoint.config, "link_frozen", False))


def _gathers(recipe: Recipe, registry: Registry) -> bool:
    """Return whether the checkpoint is put together on rank 0's host, and written from there."""
    return "gathers_checkpoint" in registry.get("checkpoint", recipe.checkpoint.use).provides


def host_memory(
    recipe: Recipe, registry: Registry, stages: Stages, hardware: Hardware, highest: HighestMemory
) -> HostMemory:
    """Return what the processes of the fullest node take; of a run of fewer ranks than a node has, of these.

    Args:
        recipe: of the run.
        registry: the plugins.
        stages: of the run.
        hardware: whose nodes they are.
        highest: activations that wait on the host, and the ranks' own tensors, which are there on CPUs.
    """
    gathers = _gathers(recipe, registry)
    first, *others = _nodes(stages, hardware)
    found = []
    for number, pp_ranks in enumerate([first, *dict.fromkeys(others)]):
        steps = [stages.step_of(rank) for rank in pp_ranks]
        checkpoint = checkpoint_bytes(stages) if gathers and number == 0 else 0
        copy = round(sum(step.saved_packed for step in steps))
        linked = round(sum(step.frozen_packed for step in steps)) if _links(recipe) else 0
        state = sum(step.state["masters"] + step.state["optimizer"] + step.copied for step in steps)
        one = HostMemory(
            ranks=len(pp_ranks),
            processes=round(PROCESS * len(pp_ranks)),
            tensors=sum(highest.ranks[rank].peak for rank in pp_ranks) if hardware.gloo else 0,
            offloaded=state if offloads_state(recipe) else 0,
            activations=sum(highest.on_host[rank] for rank in pp_ranks),
            checkpoint=checkpoint if gathers else copy,
            later_checkpoint=checkpoint if gathers else copy - linked,
            available=round(hardware.host_memory_gb * 1e9),
        )
        found.append(one)
    return max(found, key=lambda one: one.total)


def _nodes(stages: Stages, hardware: Hardware) -> Iterator[tuple[int, ...]]:
    """Yield the pipeline ranks of each node's ranks, in ascending order."""
    layout, size = stages.layout, hardware.devices_per_node
    for first in range(0, layout.world_size, size):
        ranks = range(first, min(first + size, layout.world_size))
        yield tuple(sorted(layout.coordinate(rank, "pp") if stages.pp > 1 else 0 for rank in ranks))


def offloads_state(recipe: Recipe) -> bool:
    """Return whether masters and optimizer state are on the host."""
    return bool(getattr(recipe.optimizer.config, "offload", False))
