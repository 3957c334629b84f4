"""Evaluates a run: the mean next-token loss over its validation batches."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import torch

from nanotrain_core.contracts import EvaluationReport
from nanotrain_core.run.global_metrics import agree_now, sum_over_data

if TYPE_CHECKING:
    from nanotrain_core.engine import RuntimeEngine


def evaluate(engine: RuntimeEngine) -> EvaluationReport | None:
    """Return the mean next-token loss over the validation batches, None if nothing was predicted. Collective.

    Nor is there a report if a stop is requested meanwhile: a resumed run evaluates before its first step.
    """
    run, began = engine.run, time.monotonic()
    loss, counted, seen = torch.zeros(3, 1, dtype=torch.float64, device=run.mesh.device)
    for batch, positions in run.feed.validation():
        engine.note("evaluation")
        agree_now(engine.stop, run.mesh)
        engine.reached.evaluation_pending = engine.stop.reason is not None
        if engine.reached.evaluation_pending:  # there is no time for the rest
            return None
        loss += engine.executor.forward(batch).get("lm", 0.0)
        counted += run.feed.counts(batch)["lm"]
        seen += positions
    total = sum_over_data(loss, run.mesh).item()
    counts = sum_over_data(torch.cat([counted, seen]), run.mesh, once_per_pipeline=True)
    count, positions = (int(each) for each in counts.tolist())
    if not count:
        return None
    per_token = run.feed.bytes_per_token
    bits = total / count / per_token / math.log(2) if per_token else None
    # The device has computed everything by now: its sums have been read.
    return EvaluationReport(engine.step, total / count, bits, count, positions, time.monotonic() - began)
