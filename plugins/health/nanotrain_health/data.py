"""Data metrics: effective tokens (those that the loss does not ignore), and the position in the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nanotrain_core.api.torch import MetricsReport, MixesSources, SequenceData, UpdateReport
from nanotrain_health.losses import Average
from nanotrain_health.watcher import Scene, Watcher

PER_UPDATE = "data/effective_tokens_per_update"


class DataWatcher(Watcher):
    """Counts effective tokens on the run's device, so that the host need not wait for the counts."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self.effective: float | torch.Tensor = 0.0
        self.usual = Average(scene.config.ema)
        self.tokens: dict[int, int] = {}
        """Step -> tokens of its batch, for logged steps whose metrics are pending: phases change it."""
        data = scene.run.data
        self.data = data if isinstance(data, SequenceData) else None
        self.mixed = data if isinstance(data, MixesSources) else None

    def before_update(self, update: UpdateReport) -> None:
        """Count the tokens of every step, and publish in logged ones."""
        metrics = self.scene.metrics
        effective = update.count("lm")
        if effective is not None:
            self.effective = self.effective + effective
        if not update.logged:
            return
        if effective is not None:
            metrics.scalar("data/effective_tokens", self.effective)
        if self.scene.config.level == "minimal":
            return
        self.tokens[update.step] = update.tokens
        if effective is not None:
            metrics.scalar(PER_UPDATE, effective)
        self._position()

    def _position(self) -> None:
        metrics = self.scene.metrics
        if self.data is not None:
            metrics.scalar("data/epochs", self.data.position / self.data.train)
        if self.mixed is not None:
            tokens = self.mixed.tokens_by_source()
            for source, count in tokens.items():
                metrics.scalar(f"data/mixture/{source}", count / max(1, sum(tokens.values())))

    def derive(self, report: MetricsReport) -> Mapping[str, float]:
        """Compare effective tokens with all of an update's, and with their average before."""
        if "loss" not in report.values or self.scene.config.level == "minimal":
            return {}
        value, tokens = report.values.get(PER_UPDATE), self.tokens.pop(report.step, 0)
        found = {"data/tokens_per_update": float(tokens)} if tokens else {}
        if value is None:
            return found
        usual = self.usual.value
        self.usual.add(value, report.step)
        if tokens:
            found[f"data/{self.scene.ignored}"] = 1 - value / tokens
        if usual and self.scene.ignored != "masked":  # what assistants say differs from batch to batch
            found["data/drift"] = abs(value / usual - 1)
        return found

    def meta(self) -> dict[str, Any]:
        """Return the count, for which the host waits, and the average."""
        return {"effective": float(self.effective), "usual": self.usual.meta()}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Go on counting."""
        self.effective = float(meta["effective"])
        self.usual.load_meta(meta["usual"])
