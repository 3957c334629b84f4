"""Which checkpoint a run goes back to when a monitor says that training has gone wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanotrain_core.contracts import Checkpoint, RollbackReport
from nanotrain_core.errors import Diverged
from nanotrain_core.mesh import Mesh
from nanotrain_core.stop import Rollback

if TYPE_CHECKING:
    from nanotrain_core.engine import RuntimeEngine


def roll_back(engine: RuntimeEngine) -> None:
    """Go back to a checkpoint from before what a monitor suspects, and leave the data since out from now on.

    Raises:
        Diverged: no whole checkpoint is old enough.
    """
    run, step = engine.run, engine.step
    engine.note("checkpoint")
    engine.saves.advance(wait=True)
    wish = earliest(engine.stop.rollback, run.mesh)
    restored = newest_before(wish.onset, engine.saves.checkpoint, run.mesh)
    skipped = [*run.feed.skipped, run.feed.of_last(step - wish.onset + 1)]
    engine.load(str(restored))
    run.feed.skipped = skipped  # also ranges that are younger than the checkpoint
    engine.skipped_in_a_row = 0
    engine.stop.wish_back(None)
    engine.pace.restart(engine.step)
    engine.events.rollback(RollbackReport(step, wish.onset, restored, skipped[-1], len(skipped), wish.reason))


def earliest(wish: Rollback | None, mesh: Mesh) -> Rollback:
    """Return the wish with the earliest onset among those of all ranks. Collective."""
    wishes: list[Rollback] = [each for each in mesh.gather(wish) if each is not None]
    return min(wishes, key=lambda each: each.onset)


def newest_before(onset: int, checkpoint: Checkpoint | None, mesh: Mesh) -> int:
    """Return the newest step below ``onset`` whose checkpoint is whole, as rank 0 finds it. Collective.

    Raises:
        Diverged: there is none.
    """
    steps = checkpoint.steps() if checkpoint is not None and mesh.rank == 0 else []
    whole = (s for s in reversed(steps) if s < onset and checkpoint is not None and not checkpoint.verify(s))
    step: int | None = mesh.gather(next(whole, None))[0]
    if step is None:
        raise Diverged(
            f"training went wrong at step {onset} and no whole checkpoint is older: save more often "
            "(checkpoint.every), or keep more of them (checkpoint.keep)"
        )
    return step
