"""The state of a run at a step, as checkpoints save it, and how a run resumes from it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from nanotrain_core.checkpoint.quarantine import on_rank_0, set_branch_aside
from nanotrain_core.checkpoint.run_state import NO_RUN_STATE, state_problems
from nanotrain_core.contracts import Block, TrainState
from nanotrain_core.errors import CheckpointError, NanotrainError, UnfitCheckpoint
from nanotrain_core.moe.routing import router_buffers
from nanotrain_core.recipe import write_resolved
from nanotrain_core.recipe.differences import expect_same, other_tensors
from nanotrain_core.recipe.model_table import model_table, refuse_other_model
from nanotrain_core.recipe.tree import Recipe
from nanotrain_core.run import random_state

if TYPE_CHECKING:
    from nanotrain_core.engine import RuntimeEngine


def capture_state(engine: RuntimeEngine) -> TrainState:
    """Return the live tensors of this rank, the random-number streams, and everything else as JSON."""
    run = engine.run
    engine.weights_ready()
    weights = [Block.of("", p.parameter.detach(), p.placement) for p in run.placed]
    frozen = run.frozen & {p.placement.name for p in run.placed if not p.parameter.requires_grad}
    weights = [attrs.evolve(each, frozen=each.name in frozen) for each in weights]
    buffers = router_buffers(run.stages.values()).items() if run.placements else ()  # else it is a script
    kept = [Block.of("router", tensor, run.placements[name]) for name, tensor in buffers]
    meta = {
        **engine.reached.meta(),
        "trusted": engine.step - suspect if (suspect := engine.events.suspect_steps()) else None,
        "skipped_in_a_row": engine.skipped.in_a_row,
        "rollback": engine.stop.meta(),
        "recipe": write_resolved(run.recipe) if isinstance(run.recipe, Recipe) else repr(run.recipe),
        "model": model_table(run.model) if run.model else {},
        "optimizer": run.optimizer.meta(),
        "loss_scale": run.loss_scale.meta(),
        "data": run.feed.meta(),
        "monitors": engine.events.meta(),
    }
    return TrainState([*weights, *kept, *run.optimizer.blocks()], meta, random_state.capture(run.mesh.device))


def restore_meta(engine: RuntimeEngine, meta: Mapping[str, Any]) -> None:
    """Apply a checkpoint's state of progress and data.

    Raises:
        NanotrainError: it belongs to another model or other data, or is not the state of a run.
    """
    run = engine.run
    if problems := state_problems(meta):
        raise CheckpointError(f"{NO_RUN_STATE}: {'; '.join(problems)}")
    try:
        changing = run.phases.model_keys if run.phases else ()
        refuse_other_model(meta["model"], run.model, changing=changing)
        if isinstance(run.recipe, Recipe):
            expect_same(meta["recipe"], run.recipe)
        run.feed.load_meta(meta["data"])
        run.loss_scale.load_meta(meta["loss_scale"])
        engine.events.load_meta(meta["monitors"])
        engine.reached.load_meta(meta)
        engine.skipped.in_a_row = int(meta["skipped_in_a_row"])
        engine.stop.load_meta(meta.get("rollback"))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as problem:
        raise CheckpointError(f"{NO_RUN_STATE}: {problem!r}") from None


def restore_progress(engine: RuntimeEngine, saved: TrainState) -> None:
    """Apply the rest of a checkpoint's state, after its tensors have been read.

    Raises:
        NanotrainError: see :func:`restore_meta`; or state of the optimizer, or random-number streams, are
            invalid.
    """
    restore_meta(engine, saved.meta)  # even if the checkpoint did not call it
    try:
        engine.run.optimizer.load_meta(saved.meta["optimizer"])
        random_state.restore(saved.rank_tensors)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as problem:
        raise CheckpointError(f"{NO_RUN_STATE}: {problem!r}") from None


def load_checkpoint(engine: RuntimeEngine, which: str) -> bool:
    """Restore weights, optimizer state and progress from a checkpoint; return False if there is none.

    Args:
        which: see :meth:`~nanotrain_core.contracts.Checkpoint.load`.

    Raises:
        NanotrainError: it is damaged or does not fit. The state of ``engine`` is unchanged.
    """
    assert engine.run.checkpoint is not None
    state, accepted = capture_state(engine), list[str]()

    def accept(meta: Mapping[str, Any]) -> None:
        if accepted:  # a newer checkpoint, which turned out to be damaged
            restore_meta(engine, state.meta)
        restore_meta(engine, meta)
        accepted.append(meta["recipe"])

    try:
        saved = engine.run.checkpoint.load(which, attrs.evolve(state, accept=accept))
    except NanotrainError as problem:
        restore_meta(engine, state.meta)  # that of the refused checkpoint may have been applied
        unfit = accepted and isinstance(problem, UnfitCheckpoint)
        if unfit and (why := other_tensors(accepted[-1], state.meta["recipe"], engine.run.adding)):
            raise UnfitCheckpoint(f"{problem}{why}") from None
        raise
    if saved is None:
        return False
    resume_from(engine, saved)
    if engine.folder is not None:
        folder = engine.folder / "checkpoints"
        on_rank_0(partial(set_branch_aside, folder, which, engine.step), folder, engine.run.mesh)
    return True


def resume_from(engine: RuntimeEngine, saved: TrainState) -> None:
    """Resume from a saved state, which has filled the blocks of :func:`capture_state`.

    Raises:
        NanotrainError: see :func:`restore_progress`.
    """
    restore_progress(engine, saved)
    if not saved.rank_tensors:  # another layout: new streams, not those of the first steps again
        seed = random_state.stream_seed(engine.run.seed, "resumed", engine.step)
        random_state.seed_all(seed, engine.run.mesh.rank)
