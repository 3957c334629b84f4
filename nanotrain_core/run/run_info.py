"""The description of a run that monitors receive when it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from nanotrain_core.compose import Run
from nanotrain_core.contracts import Block, RunInfo
from nanotrain_core.layout.placement import Piece, Placement
from nanotrain_core.metrics.publish import Metrics
from nanotrain_core.precision.quantized_storage import dequantize
from nanotrain_core.run.global_metrics import count_parameters

if TYPE_CHECKING:
    from nanotrain_core.engine import RuntimeEngine


def run_info(engine: RuntimeEngine) -> RunInfo:
    """Describe the run of ``engine``. Collective."""
    run, described = engine.run, engine.run.described
    parameters = count_parameters(run.placed, run.mesh)
    trained = count_parameters((p for p in run.placed if p.parameter.requires_grad), run.mesh)
    if trained < parameters:
        described = (*described, f"{trained:,} of the parameters are trained ({trained / parameters:.2%})")
    return RunInfo(
        name=run.name,
        folder=engine.folder,
        steps=engine.steps,
        first_step=engine.step,
        rank=run.mesh.rank,
        world_size=run.mesh.world_size,
        device=run.mesh.device,
        parameters=parameters,
        tokens_per_step=run.feed.tokens_per_step,
        length=run.feed.length,
        flops_per_token=run.flops_per_token,
        recipe=run.recipe,
        optimizer_bytes=sum(b.tensor.nbytes for b in run.optimizer.blocks()),
        optimizer_device_bytes=partial(_optimizer_device_bytes, run),
        mesh=engine.monitoring.mesh,
        parts=tuple(run.stages.values()),
        placed=run.placed,
        data=run.feed.data,
        logits=engine.monitoring.collectives.before(engine.executor.logits),
        weights=partial(_weights, engine),
        optimizer_state=partial(_optimizer_state, run),
        observe_outputs=engine.monitoring.observers.observe_outputs,
        observe_calls=engine.monitoring.observers.observe_calls,
        monitor_barrier=engine.monitoring.collectives.enter,
        progress=engine.progress,
        metrics=Metrics(engine.monitoring.reducer, 0, "", strict=False),
        schedule=run.schedule,
        current_schedule=lambda: engine.run.schedule,
        pipeline_share=run.pipeline_share,
        described=described,
    )


def _optimizer_device_bytes(run: Run) -> int:
    kind = run.mesh.device.type
    return sum(b.tensor.nbytes for b in run.optimizer.blocks() if b.tensor.device.type == kind)


def _weights(engine: RuntimeEngine) -> Iterator[tuple[torch.Tensor, Placement]]:
    engine.weights_ready()
    run = engine.run
    yield from ((dequantize(placed.parameter.detach()), placed.placement) for placed in run.placed)


def _optimizer_state(
    run: Run, *names: str, wanted: Callable[[Placement], bool] = lambda placement: True
) -> Iterator[tuple[torch.Tensor, Placement]]:
    pieces = [piece for piece in run.gradients.pieces() if wanted(piece.placement)]
    of_name: dict[str, list[Piece]] = {}
    for piece in pieces:
        of_name.setdefault(piece.placement.name, []).append(piece)
    placements = {name: own[0].placement for name, own in of_name.items()}
    for block in run.optimizer.blocks_of(placements):
        kind, _, parameter = block.name.partition("/")
        if kind not in names or not block.tensor.is_floating_point() or not block.tensor.shape:
            continue
        if any(_yields(block, piece) for piece in of_name[parameter]):
            yield block.tensor, placements[parameter]


def _yields(block: Block, piece: Piece) -> bool:
    """Return whether the rank with this piece yields a state, among those with parts of the parameter.

    Each may have all of the state, or all of that of its block if the state has only some of the parameter's
    axes, as a mean over rows: one with the first element of what the state lacks yields it.
    """
    where = piece.placement
    if block.tensor.shape == block.global_shape:
        lacking: list[int] = [*where.offset]
    else:
        state = [*zip(block.tensor.shape, block.offset, block.global_shape, strict=True)]
        lacking = []
        for axis in zip(where.shape, where.offset, where.global_shape, strict=True):
            if state and axis == state[0]:
                del state[0]
            else:
                lacking.append(axis[1])
        if state or not lacking:  # divided as the parameter is, or as its ranges are
            return True
    return all(where.shape) and not any(lacking) and (piece.span is None or piece.span[0] == 0)
