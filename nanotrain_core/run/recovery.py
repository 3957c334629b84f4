"""How a run that was started again goes on without a checkpoint, where a monitor has kept its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from nanotrain_core.contracts import Restore
from nanotrain_core.run.train_state import capture_state, go_on_from

if TYPE_CHECKING:
    from nanotrain_core.engine import RuntimeEngine


@attrs.define(frozen=True)
class Restart:
    """What a launcher knows: fields of :class:`~nanotrain_core.contracts.Restore` of the same names."""

    may_restart: bool = False
    again: bool = False
    failed_at: float | None = None
    identity: Callable[[], Mapping[str, str]] = dict
    recoverable: Callable[[int], None] = lambda step: None
    delete_at_end: Callable[[Path], None] = lambda path: None

    def restore(self, engine: RuntimeEngine, folder: Path) -> Restore:
        """Return what monitors are told before checkpoints are looked for in ``folder``."""
        run = engine.run
        assert run.checkpoint is not None
        fixed = run.name, folder, engine.resume, run.checkpoint.steps, run.mesh
        return Restore(*fixed, lambda: capture_state(engine), **attrs.asdict(self))


def recover(engine: RuntimeEngine, restore: Restore) -> bool:
    """Collective. Go on from what a monitor has kept, if ranks were started again and it is no older than the
    newest checkpoint; return whether it is so.

    A checkpoint that was due at its step and is not there is made up for after the next one.
    """
    if not restore.again:
        return False
    mesh = engine.run.mesh
    steps: list[int] = mesh.gather([*restore.steps()] if mesh.rank == 0 else [])[0]
    saved = engine.events.recover(restore, max(steps, default=0))
    if saved is None:
        return False
    go_on_from(engine, saved, saved.blocks)
    engine.resume = None
    if engine.step in steps:
        engine._saved = engine.step
    else:
        engine._owes_save = engine.saves.due(engine.step)
    return True
