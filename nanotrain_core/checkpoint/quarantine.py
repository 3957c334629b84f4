"""Renames checkpoints, files or folders: damaged ones, and those of an abandoned branch. Torch-free."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from nanotrain_core.checkpoint.listing import resume_path
from nanotrain_core.errors import CheckpointError

if TYPE_CHECKING:
    from nanotrain_core.layout.mesh import Mesh

#: The name of a checkpoint in any format: its step, and the format's suffix.
_NAME = re.compile(r"step-([0-9]{8,})(\.\w+)?")


def quarantine_checkpoint(damaged: Path) -> Path:
    """Rename a damaged ``step-<number>``, so that its step can be saved again; return its new path."""
    step = damaged.stem.removeprefix("step-")
    target = _free(damaged.parent, time.strftime(f".corrupt-{step}-%Y%m%d-%H%M%S"))
    damaged.rename(target)
    return target


def set_checkpoints_aside(folder: Path, unwanted: Iterable[Path]) -> Path | None:
    """Move checkpoints into ``folder/superseded-<time>/``; return that folder, or None if there were none."""
    there = list(unwanted)
    if not there:
        return None
    aside = _free(folder, time.strftime("superseded-%Y%m%d-%H%M%S"))
    aside.mkdir()
    for old in there:
        old.rename(aside / old.name)
    return aside


def set_branch_aside(folder: Path, which: str, step: int) -> None:
    """Move aside the branch that a run leaves when it continues from ``step``, in whatever format it is.

    It consists of the later steps in ``folder``, and of all there if the run continues from one elsewhere.
    A format knows its own checkpoints alone: those of another one would still be the newest.

    Args:
        folder: the run's checkpoints.
        which: what was loaded, as :meth:`~nanotrain_core.contracts.Checkpoint.load` takes it.
        step: of the checkpoint that was loaded.
    """
    path = resume_path(which)
    own = path is None or path.resolve().parent == folder.resolve()
    named = ((entry, _NAME.fullmatch(entry.name)) for entry in folder.glob("step-*") if entry.exists())
    left = [entry for entry, name in named if name and (int(name[1]) > step or not own)]
    if aside := set_checkpoints_aside(folder, left):
        import structlog  # every command imports this module, and `--help` needs no logger

        log = structlog.get_logger("nanotrain.checkpoint")
        log.warning("checkpoints of an abandoned branch were set aside", now=str(aside))


def on_rank_0(act: Callable[[], None], folder: Path, mesh: Mesh) -> None:
    """Modify ``folder`` on rank 0, or fail on every rank: the others would wait for one that has ended.

    Raises:
        CheckpointError: it cannot be written.
    """
    problem = ""
    try:
        if mesh.rank == 0:
            act()
    except OSError as error:
        problem = f"{folder} cannot be written: {error.strerror or error}"
    if problem := mesh.gather(problem)[0]:
        raise CheckpointError(problem)


def _free(folder: Path, stem: str) -> Path:
    """Return an unused path: two made within a second would replace one another."""
    names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
    return next(folder / name for name in names if not (folder / name).exists())
