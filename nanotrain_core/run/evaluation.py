"""Evaluates a run: the mean of each loss term over its validation batches."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs
import torch

from nanotrain_core.contracts import EvaluationReport
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.run.global_metrics import agree_now, sum_over_data

if TYPE_CHECKING:
    from nanotrain_core.engine import RuntimeEngine


def evaluate(engine: RuntimeEngine) -> EvaluationReport | None:
    """Return the mean losses over the validation batches, None if nothing was predicted. Collective.

    Nor is there a report if a stop is requested meanwhile: a resumed run evaluates before its first step.
    """
    run, began = engine.run, time.monotonic()
    sums = run.validation_sums()
    for batch, positions in run.feed.validation():
        engine.note("evaluation")
        agree_now(engine.stop, run.mesh)
        engine.reached.evaluation_pending = engine.stop.reason is not None
        if engine.reached.evaluation_pending:  # there is no time for the rest
            return None
        sums.add(engine.executor.forward(batch), run.feed.counts(batch), positions)
    found = sums.total()
    if found is None:
        return None
    loss, bits = found.loss, found.bits_per_byte(run.feed.bytes_per_token)
    # The device has computed everything by now: its sums have been read.
    seconds = time.monotonic() - began
    return EvaluationReport(engine.step, loss, bits, found.tokens, found.positions, seconds, found.losses)


@attrs.define(frozen=True)
class Validation:
    """What a model loses in validation batches."""

    loss: float
    """Mean next-token loss; of a model without that term, the weighted sum of its terms, as in training."""
    losses: Mapping[str, float]
    """Unweighted mean of each loss term that the model returned."""
    tokens: int
    """The predicted tokens."""
    positions: int
    """Tokens, predicted or not, without padding."""

    def bits_per_byte(self, bytes_per_token: float | None) -> float | None:
        """Return the next-token loss per byte of the text; None without one, or where tokens are no text."""
        return self.loss / bytes_per_token / math.log(2) if self.tokens and bytes_per_token else None


class ValidationSums:
    """This rank's sums of every loss term over validation batches, and the counts that divide them."""

    def __init__(self, weights: Mapping[str, float], mesh: Mesh) -> None:
        self._weights, self._terms, self._mesh, self._found = weights, [*weights], mesh, set[str]()
        self._losses = torch.zeros(len(self._terms), dtype=torch.float64, device=mesh.device)
        self._counts = torch.zeros(len(self._terms) + 1, dtype=torch.float64, device=mesh.device)

    def add(
        self, losses: Mapping[str, torch.Tensor], counts: Mapping[str, torch.Tensor], positions: int
    ) -> None:
        """Add the loss sums that this rank's stages returned for a batch, its counts and its tokens."""
        for place, term in enumerate(self._terms):
            self._counts[place] += counts[term]
            if term in losses:
                self._losses[place] += losses[term].detach().reshape(())
                self._found.add(term)
        self._counts[-1] += positions

    def total(self) -> Validation | None:
        """Return the means over the batches of all ranks; None if nothing was counted. Collective.

        A model whose next-token loss has no token in them has no report, whatever its other terms.
        """
        found = [float(term in self._found) for term in self._terms]
        sums = sum_over_data(self._losses, self._mesh, extra_sums=found).tolist()
        *counts, positions = sum_over_data(self._counts, self._mesh, once_per_pipeline=True).tolist()
        each = zip(self._terms, sums, sums[len(counts) :], counts, strict=False)
        losses = {term: total / count for term, total, returned, count in each if returned and count}
        if "lm" not in self._weights:
            loss = sum(self._weights[term] * mean for term, mean in losses.items())
            return Validation(loss, losses, 0, int(positions)) if losses else None
        tokens = int(counts[self._terms.index("lm")])
        return Validation(losses.get("lm", 0.0), losses, tokens, int(positions)) if tokens else None
