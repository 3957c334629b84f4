"""Resumes a restarted run without a checkpoint, from state that a monitor has kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from nanotrain_core.checkpoint.saver import steps_of
from nanotrain_core.contracts import Restore
from nanotrain_core.run.train_state import capture_state, resume_from
from nanotrain_core.watch.progress import START

if TYPE_CHECKING:
    from nanotrain_core.engine import RuntimeEngine


@attrs.define(frozen=True)
class Restart:
    """A launcher's restart information, with the names of :class:`~nanotrain_core.contracts.Restore`."""

    may_restart: bool = False
    restarted: bool = False
    failed_at: float | None = None
    identity: Callable[[], Mapping[str, str]] = dict
    recoverable: Callable[[int], None] = lambda step: None
    delete_at_end: Callable[[Path], None] = lambda path: None

    def restore(self, engine: RuntimeEngine, folder: Path) -> Restore:
        """Return the event for monitors before the core searches ``folder`` for checkpoints."""
        run = engine.run
        assert run.checkpoint is not None
        return Restore(
            name=run.name,
            folder=folder,
            which=engine.resume,
            steps=partial(steps_of, run.checkpoint),
            verify=run.checkpoint.verify,
            mesh=run.mesh,
            state=lambda: capture_state(engine),
            heartbeat=lambda: engine.progress.note(START),
            **attrs.asdict(self),
        )


def recover(engine: RuntimeEngine, restore: Restore) -> bool:
    """Collective. Resume from a monitor's state, if ranks were restarted and it is no older than the
    newest checkpoint; return whether that succeeded.

    If a checkpoint that was due since the newest one is missing, because its save was in progress when the
    ranks ended, one is saved after the next step.
    """
    if not restore.restarted:
        return False
    mesh = engine.run.mesh
    steps: list[int] = mesh.gather([*restore.steps()] if mesh.rank == 0 else [])[0]
    newest = max(steps, default=0)
    saved = engine.events.recover(restore, newest)
    if saved is None:
        return False
    resume_from(engine, saved)
    engine.resume = None
    if engine.step in steps:
        engine.saved_step = engine.step
    else:
        # The newest first: a format may communicate in `due`, and all ranks find the same step.
        engine.reached.save_pending |= any(map(engine.saves.due, range(engine.step, newest, -1)))
    return True
