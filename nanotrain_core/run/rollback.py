"""Rolls a run back to a checkpoint when a monitor reports that it went wrong."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import structlog

from nanotrain_core.checkpoint.saver import steps_of
from nanotrain_core.contracts import RollbackReport
from nanotrain_core.errors import CheckpointError, Diverged
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.phases.timeline import PhaseTimeline
from nanotrain_core.run.global_metrics import folder_lost
from nanotrain_core.run.stop import Rollback, StopRequest

if TYPE_CHECKING:
    from nanotrain_core.engine import RuntimeEngine

log = structlog.get_logger("nanotrain.checkpoint")


def roll_back(engine: RuntimeEngine) -> None:
    """Go back to a checkpoint from before the suspect step, and skip the data since then from now on.

    Raises:
        Diverged: no complete checkpoint is old enough.
    """
    run, step = engine.run, engine.step
    engine.note("checkpoint")
    if folder_lost(engine.stop, run.mesh):  # its checkpoints are another run's
        return
    engine.saves.advance(wait=True)
    request = earliest(engine.stop.rollback, run.mesh)
    assert request is not None
    skipped = [*run.feed.skipped, run.feed.of_last(step - request.onset + 1)]
    restored = load_newest_before(request.onset, engine)
    if run.phases is not None and run.mesh.rank == 0:
        warn_of_lengths(
            run.phases.timeline, run.feed.tokens, first=request.onset - restored, last=step - restored
        )
    run.feed.skipped = skipped  # also ranges that are newer than the checkpoint
    # A pending stop request stays in force: one more step is taken, with which the range is saved.
    engine.skipped.in_a_row, engine.stop.reason = 0, None
    engine.reached.nothing_pending()
    engine.stop.request_rollback(None)
    engine.readback.forget()
    engine.monitoring.reducer.forget()
    engine.throughput.restart()
    engine.events.rollback(
        RollbackReport(step, request.onset, restored, skipped[-1], len(skipped), request.reason)
    )


def warn_of_lengths(timeline: PhaseTimeline, tokens: int, *, first: int, last: int) -> None:
    """Log a warning if sequences of several lengths are skipped: replayed, they all have the first length.

    Args:
        timeline: of the run.
        tokens: number trained on at the checkpoint.
        first: first suspect step, counted from 1 after the checkpoint.
        last: last suspect step.
    """
    lengths = {batch.length for batch in islice(timeline.batches(tokens), first - 1, last)}
    if len(lengths) > 1:
        log.warning(
            "the sequences to skip have several lengths: not all suspect data is skipped",
            lengths=sorted(lengths),
        )


def keep_pending(stop: StopRequest, mesh: Mesh) -> None:
    """Give every rank of a stopped run the request that no step has agreed on yet, for its checkpoint.

    Collective. The resumed run requests it again before its first step, and so rolls back after the same step
    as a run that was not stopped. Rolling back here instead would skip the data of one step less.
    """
    if stop.reason:
        stop.rollback = earliest(stop.rollback, mesh)


def earliest(request: Rollback | None, mesh: Mesh) -> Rollback | None:
    """Return the request with the earliest onset among those of all ranks, None without any. Collective."""
    requests: list[Rollback] = [each for each in mesh.gather(request) if each is not None]
    return min(requests, key=lambda each: each.onset, default=None)


def load_newest_before(onset: int, engine: RuntimeEngine) -> int:
    """Load the newest checkpoint of a step below ``onset`` that is complete and that all ranks can read.

    The load verifies it, each rank its own shard: one rank reading all of it would stall the others too long.

    Returns:
        Its step. Collective.

    Raises:
        Diverged: there is none.
    """
    checkpoint, mesh = engine.saves.checkpoint, engine.run.mesh
    steps: list[int] = mesh.gather(steps_of(checkpoint) if checkpoint and mesh.rank == 0 else [])[0]
    for step in reversed([step for step in steps if step < onset]):
        try:
            if engine.load(str(step)):
                return step
        except CheckpointError as problem:  # on every rank
            if mesh.rank == 0:
                log.warning("cannot roll back to a checkpoint", step=step, problem=str(problem))
    if checkpoint is None:
        raise Diverged(
            f"training went wrong at step {onset} and this run saves no checkpoints to roll back to: "
            "it needs a folder (in a script, ScriptConfig(folder=..., save_every=...))"
        )
    raise Diverged(
        f"training went wrong at step {onset} and there is no older complete checkpoint: save more often "
        "(checkpoint.every; save_every of a script), or keep more of them (checkpoint.keep; keep)"
    )
