"""What monitors are told of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nanotrain_core.contracts import StepReport, StepStats
from nanotrain_core.pipeline.executor import Losses
from nanotrain_core.run.events import step_values
from nanotrain_core.run.global_metrics import bubble, expert_load, sum_over_data

if TYPE_CHECKING:
    from nanotrain_core.engine import RuntimeEngine


def tell_step(
    engine: RuntimeEngine, losses: Losses, counts: Losses, stats: StepStats, *, lr: float, logged: bool
) -> None:
    """Tell monitors of the step just done and, if it is ``logged``, of what they published until then."""
    report = step_report(engine, losses, counts, stats, lr=lr, logged=logged)
    engine.events.step(report, logged=logged)
    for found in engine.watching.board.logged(report.step, step_values(report)) if logged else ():
        engine.events.metrics(found)


def step_report(
    engine: RuntimeEngine, losses: Losses, counts: Losses, stats: StepStats, *, lr: float, logged: bool
) -> StepReport:
    """Return the report of the step just done. Collective, and waits for the device."""
    run, names = engine.run, list(engine.run.loss_weights)
    nothing = torch.zeros((), device=run.mesh.device)
    sums = sum_over_data(torch.stack([losses.get(name, nothing) for name in names]), run.mesh)
    means = {n: (s / counts[n]).item() for n, s in zip(names, sums.unbind(), strict=True)}
    seconds = engine.pace.seconds_per_step(engine.step, restart=logged)
    return StepReport(
        step=engine.step,
        loss=sum(run.loss_weights[name] * value for name, value in means.items()),
        losses=means,
        grad_norm=stats.grad_norm.item(),
        lr=lr,
        tokens=run.feed.tokens,
        tokens_per_second=run.feed.tokens_per_step / seconds,
        seconds=seconds,
        loss_scale=run.loss_scale.value,
        skipped=bool(stats.skipped),
        expert_load=expert_load(engine.loads.values(), run.mesh) if run.has_routers else None,
        bubble=bubble(engine.executor.idle, run.owners, run.mesh),
    )
