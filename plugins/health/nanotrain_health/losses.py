"""Loss: its average, spikes, perplexity, and how far validation is from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nanotrain_core.api.torch import EvaluationReport, MetricsReport
from nanotrain_health.watcher import Scene, Watcher


class Average:
    """An exponential moving average over steps, some of which may be missing."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.value: float | None = None
        self.step = 0

    def add(self, value: float, step: int) -> None:
        """Add a step's value, which also stands for missing steps before it; ignored if it is not finite."""
        if not math.isfinite(value):
            return
        kept = self.decay ** max(1, step - self.step)
        self.value = value if self.value is None else kept * self.value + (1 - kept) * value
        self.step = step

    def meta(self) -> list[float | int | None]:
        """Return it as JSON."""
        return [self.value, self.step]

    def load_meta(self, meta: list[Any]) -> None:
        """Become what :meth:`meta` returned."""
        self.value, self.step = meta


class Losses(Watcher):
    """Watches the numbers of reports."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self.average, self.tokens = Average(scene.config.ema), Average(scene.config.ema)
        """Averages of the training loss, and of its next-token term."""
        self.phase: float | None = None
        """The run's phase: another phase may weight the terms of the loss differently."""

    def derive(self, report: MetricsReport) -> Mapping[str, float]:
        """Compare the loss of a logged step with its average before, and take it in."""
        loss = report.values.get("loss")
        if loss is None:
            return {}
        if report.values.get("phase") != self.phase:
            self.phase, self.average = report.values.get("phase"), Average(self.scene.config.ema)
        finite = math.isfinite(loss)
        found = {"loss/nonfinite": float(not finite)}
        if finite and self.average.value:
            found["loss/spike"] = loss / self.average.value
        self.average.add(loss, report.step)
        if self.average.value is not None:
            found["loss/ema"] = self.average.value
        of_tokens = report.values.get("losses/lm")  # None: the model has no next-token loss
        self.tokens.add(loss if of_tokens is None else of_tokens, report.step)
        if of_tokens is not None and self.scene.config.level != "minimal":
            found["loss/perplexity"] = perplexity(of_tokens)
        return found

    def evaluation(self, report: EvaluationReport) -> None:
        """Publish perplexity and the gap."""
        metrics = self.scene.metrics
        if self.scene.config.level == "minimal":
            return
        if report.tokens:  # a model without a next-token loss predicts none
            metrics.scalar("validation/perplexity", perplexity(report.loss))
        if self.tokens.value is not None:
            metrics.scalar("validation/gap", report.loss - self.tokens.value)
        if report.tokens and report.positions:
            metrics.scalar(f"validation/{self.scene.ignored}", 1 - report.tokens / report.positions)

    def meta(self) -> dict[str, Any]:
        """Return both averages."""
        return {"average": self.average.meta(), "tokens": self.tokens.meta(), "phase": self.phase}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Go on with them."""
        self.average.load_meta(meta["average"])
        self.tokens.load_meta(meta["tokens"])
        self.phase = meta.get("phase")


def perplexity(loss: float) -> float:
    """Return exp(loss) of a loss in nats, infinity where a float would overflow."""
    return math.exp(loss) if loss < 700 else math.inf
