"""What monitors are told of a run when it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanotrain_core.contracts import RunInfo
from nanotrain_core.run.global_metrics import count_parameters

if TYPE_CHECKING:
    from nanotrain_core.engine import RuntimeEngine


def run_info(engine: RuntimeEngine) -> RunInfo:
    """Describe the run of ``engine``. Collective."""
    run = engine.run
    return RunInfo(
        name=run.name,
        folder=engine.folder,
        steps=engine.steps,
        first_step=engine.step,
        rank=run.mesh.rank,
        world_size=run.mesh.world_size,
        device=run.mesh.device,
        parameters=count_parameters(run.placed, run.mesh),
        tokens_per_step=run.feed.tokens_per_step,
        flops_per_token=run.flops_per_token,
        recipe=run.recipe,
        optimizer_bytes=sum(b.tensor.nbytes for b in run.optimizer.blocks()),
        mesh=run.mesh,
        parts=tuple(run.stages.values()),
        placed=run.placed,
        data=run.feed.data,
        logits=engine.executor.logits,
        progress=engine.progress,
        described=run.described,
    )
