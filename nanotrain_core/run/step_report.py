"""The report that monitors receive of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from nanotrain_core.contracts import StepReport, StepStats
from nanotrain_core.metrics.of_reports import of_step
from nanotrain_core.pipeline.executor import Losses
from nanotrain_core.run.global_metrics import bubble, expert_load, sum_over_data

if TYPE_CHECKING:
    from nanotrain_core.engine import RuntimeEngine


def report_step(
    engine: RuntimeEngine,
    losses: Losses,
    counts: Losses,
    stats: StepStats,
    *,
    lr: float,
    loss_scale: float,
    logged: bool,
) -> None:
    """Send monitors the report of the step just done and, if it is ``logged``, what was published until then.

    Collective, and synchronizes with the device.

    Args:
        engine: of the run.
        losses: for each loss term, this rank's sum over its microbatches, not scaled.
        counts: of the whole run, by which these sums are divided.
        stats: the optimizer's report of the step.
        lr: learning rate of the step.
        loss_scale: of the step; an overflow has lowered that of the next.
        logged: whether the step is one that is logged.
    """
    run, names = engine.run, list(engine.run.loss_weights)
    nothing = torch.zeros((), device=run.mesh.device)
    sums = sum_over_data(torch.stack([losses.get(name, nothing) for name in names]), run.mesh)
    means = {n: (s / counts[n]).item() for n, s in zip(names, sums.unbind(), strict=True)}
    seconds, tokens, sequences, flops = engine.throughput.since(restart=logged)
    report = StepReport(
        step=engine.step,
        loss=sum(run.loss_weights[name] * value for name, value in means.items()),
        losses=means,
        grad_norm=stats.grad_norm.item(),
        lr=lr,
        tokens=run.feed.tokens,
        tokens_per_second=tokens,
        seconds=seconds,
        loss_scale=loss_scale,
        skipped=bool(stats.skipped),
        expert_load=expert_load(engine.loads.values(), run.mesh) if run.has_routers else None,
        bubble=bubble(engine.executor.idle, run.owners, run.mesh),
        phase=run.phases.number if run.phases else None,
        length=run.feed.length,
        flops_per_token=flops,
        sequences_per_second=sequences,
    )
    engine.events.step(report, logged=logged)
    if logged:
        for found in engine.monitoring.reducer.logged(report.step, of_step(attrs.asdict(report))):
            engine.events.metrics(found)
