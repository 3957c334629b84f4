"""What earlier attempts of this launch have done, and what the next one starts from because of it.

A rank is started again after a failure, maybe on another host, with the arguments of the first attempt: only
files, the store and the run folder tell it that it is not the first, and whether the run has saved since.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from nanotrain_core.checkpoint.listing import expect_own_kind
from nanotrain_core.launch.attempts import LaunchHistory
from nanotrain_core.launch.environment import agent_name
from nanotrain_core.recipe import Recipe
from nanotrain_core.registry.registry import Registry
from nanotrain_core.run.folder import claimed_by
from nanotrain_core.watch.scratch import FAILED_AT, FOLDER, HAS_SAVED

if TYPE_CHECKING:
    from nanotrain_core.launch.worker import Job


def restart_count() -> int:
    """Return how often this host's launcher has restarted ranks after one of its own failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def recorded_folder(scratch: Path) -> str | None:
    """Return the run folder that ranks of this host have recorded: with several hosts rank 0 selects it."""
    path = scratch / FOLDER
    return path.read_text(encoding="utf-8") if path.exists() else None


def local_history(job: Job) -> LaunchHistory:
    """Return the :class:`LaunchHistory` of this launch, as far as this host's launcher has recorded it."""
    scratch = Path(job.scratch) if job.scratch else None
    folder = recorded_folder(scratch) if scratch else None
    saved = scratch is not None and (scratch / HAS_SAVED).exists()
    seen = scratch / FAILED_AT if scratch else None
    failed_at = float(seen.read_text()) if seen is not None and seen.exists() else None
    began, agent = restart_count() > 0 or folder is not None, None if scratch else agent_name()
    history = LaunchHistory(began=began, saved=saved, folder=folder, failed_at=failed_at)
    return history if agent is None else attrs.evolve(history, agents=(agent,))


def saved_marker(job: Job, folder: Path) -> Path | None:
    """Return the file that records that this launch has saved, None if its ranks would not be restarted.

    An earlier launch of torchrun may have left one in the run folder: it contains the names of agents.
    """
    if job.scratch is not None:
        return Path(job.scratch, HAS_SAVED)
    return folder / f".{HAS_SAVED}" if "TORCHELASTIC_RESTART_COUNT" in os.environ else None


def start_from(
    job: Job, folder: Path, marker: Path | None, history: LaunchHistory, use: str, registry: Registry
) -> str | None:
    """Return the checkpoint to start from, None for the beginning: after a restart the run's own newest.

    Called on rank 0 only.

    A run that was started from a given checkpoint restarts from it until it has saved one, as recorded in
    ``history`` or ``marker``; a new one begins anew, also for monitors that know of other runs' checkpoints.
    From then on there must be one: if rank 0 is on a host that sees none, the run fails.

    Args:
        job: of this rank, with the checkpoint that the user asked for.
        folder: the run folder.
        marker: the file of :func:`saved_marker`; one of an earlier launch is deleted.
        history: of this launch.
        use: the recipe's checkpoint component.
        registry: the plugins.

    Raises:
        CheckpointError: see :func:`~nanotrain_core.checkpoint.listing.expect_own_kind`.
    """
    saved = history.saved or (marker is not None and marker.exists() and _is_of(marker, history.agents))
    if marker is not None and not saved:
        marker.unlink(missing_ok=True)  # of an earlier launch
    resume = "latest" if history.began and saved else job.resume
    if history.began and resume is None and _has_checkpoints(folder):
        resume = "auto"
    expect_own_kind(folder, resume, use, registry)
    return resume


def _has_checkpoints(folder: Path) -> bool:
    """Return whether the run has any: it may have died after a save, before that was recorded."""
    saved = folder / "checkpoints"
    return saved.is_dir() and any(entry.name[0] != "." for entry in saved.iterdir())


def _is_of(marker: Path, agents: Sequence[str]) -> bool:
    """Return whether a file was written by a launch with one of these agents."""
    return not {*agents}.isdisjoint(marker.read_text(encoding="utf-8").splitlines())


def with_claimed_folder(history: LaunchHistory, job: Job, recipe: Recipe) -> LaunchHistory:
    """Add the run folder that this launch has claimed before, for rank 0, which reads the disk.

    The ranks' store ends with an attempt if torchrun does not serve it, as gloo needs it: only the folder
    then tells of earlier ones.
    """
    if history.folder is not None or not history.agents:
        return history
    folder = claimed_by(history.agents, recipe.run.name, job.folder or recipe.run.folder)
    return attrs.evolve(history, began=True, folder=str(folder)) if folder is not None else history
