"""How a run becomes what it was at a checkpoint, and which one, when a monitor says that it went wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanotrain_core.contracts import Checkpoint, RollbackReport
from nanotrain_core.errors import CheckpointError, Diverged
from nanotrain_core.mesh import Mesh
from nanotrain_core.model_table import refuse_other_model
from nanotrain_core.stop import Rollback

if TYPE_CHECKING:
    from nanotrain_core.engine import RuntimeEngine


def become(engine: RuntimeEngine, meta: Mapping[str, Any]) -> None:
    """Take over what a checkpoint says beside its tensors.

    Raises:
        NanotrainError: it is of another model or of other data, or not the state of a run.
    """
    run = engine.run
    try:
        refuse_other_model(meta["model"], run.model_table, free=run.free_model_keys)
        run.feed.load_meta(meta["data"])
        run.loss_scale.load_meta(meta["loss_scale"])
        engine.events.load_meta(meta.get("monitors", {}))
        engine.step = int(meta["step"])
    except (AttributeError, LookupError, TypeError, ValueError) as problem:
        raise CheckpointError(f"the checkpoint has not the state of a run: {problem!r}") from None


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
