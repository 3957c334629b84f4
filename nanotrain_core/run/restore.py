"""Where a run starts: state that a monitor has kept, the requested checkpoint, or the beginning."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nanotrain_core.errors import CheckpointError
from nanotrain_core.run.recovery import recover

if TYPE_CHECKING:
    from nanotrain_core.engine import RuntimeEngine


def restore(engine: RuntimeEngine) -> None:
    """Open the run folder's checkpoints and restore the requested one.

    Raises:
        CheckpointError: there is nothing to resume from, or it is damaged or does not fit.
    """
    checkpoint, folder, which = engine.run.checkpoint, engine.folder, engine.resume
    if checkpoint is None or folder is None:
        if which not in (None, "auto"):
            raise CheckpointError(f"resume = {which!r} needs the run folder: pass folder=...")
        return
    checkpoint.open(folder / "checkpoints", engine.run.mesh)
    event = engine.restart.restore(engine, folder / "checkpoints")
    engine.events.before_restore(event)
    if recover(engine, event) or which is None:
        return
    if not engine.load("latest" if which == "auto" else which) and which != "auto":
        where = "" if folder.is_absolute() else f" (relative to {Path.cwd()})"
        raise CheckpointError(f"there is no checkpoint in {folder} to resume from{where}")
    engine.resume = None
