"""The ``health`` monitor: publishes training statistics, and reports problems in plain sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanotrain_core.api.torch import (
    EvaluationReport,
    MetricsReport,
    Monitor,
    RollbackReport,
    RunInfo,
    UpdateReport,
)
from nanotrain_health import HealthConfig
from nanotrain_health.activations import Activations
from nanotrain_health.attention import Attention
from nanotrain_health.data import DataWatcher
from nanotrain_health.diagnosis import Diagnosis
from nanotrain_health.losses import Losses
from nanotrain_health.ratios import Ratios
from nanotrain_health.tensors import Tensors
from nanotrain_health.watcher import Watcher, scene_of

#: Watchers of values that the run has anyway, and those that also read tensors in logged steps.
MINIMAL: tuple[type[Watcher], ...] = (Losses, DataWatcher, Ratios)
STANDARD = (*MINIMAL, Tensors, Activations, Attention)


class Health(Monitor):
    """Forwards events to one watcher per subject, and judges the metrics of all monitors by their rules."""

    reads_weights = False

    def __init__(self, config: HealthConfig) -> None:
        self.config = config
        self.watchers: dict[str, Watcher] = {}
        self.diagnosis = Diagnosis(config.patience)
        self.remembered: Mapping[str, Any] = {}
        """State from a checkpoint, kept until the watchers exist."""

    def on_start(self, run: RunInfo) -> None:
        """Begin to watch, or go on."""
        remembered, self.run = self.meta(), run
        scene = scene_of(run, self.config)
        kinds = MINIMAL if self.config.level == "minimal" else STANDARD
        self.watchers = {kind.__name__: kind(scene) for kind in kinds}
        self.scene = scene
        self.from_tensors = frozenset(metric.name for metric in self.declared if metric.every > 1)
        scene.begin(run.first_step + 1)
        self.load_meta(remembered)

    def on_before_update(self, update: UpdateReport) -> None:
        """Look at a complete gradient."""
        for watcher in self.watchers.values():
            watcher.before_update(update)

    def on_after_update(self, update: UpdateReport) -> None:
        """Look at what was changed."""
        for watcher in self.watchers.values():
            watcher.after_update(update)
        self.scene.end(update)

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Look at a validation loss."""
        for watcher in self.watchers.values():
            watcher.evaluation(report)

    def derive(self, report: MetricsReport) -> Mapping[str, float]:
        """Return what follows from reduced metrics."""
        found: dict[str, float] = {}
        for watcher in self.watchers.values():
            found |= watcher.derive(report)
        return found

    def on_metrics(self, report: MetricsReport) -> None:
        """Say what is wrong, once when it begins and once when it ends."""
        said = self.diagnosis.judge(report)
        self.diagnosis.log(said, report.step, shown=self.run.rank == 0)
        self.scene.read_closely(self.diagnosis.undecided(self.from_tensors, report.step))
        if said:
            self.run.metrics.text("health", " ".join(each.text for each in said))

    def on_rollback(self, report: RollbackReport) -> None:
        """Forget when tensors were last read: that may be a step which is computed again."""
        self.scene.looked = 0
        self.scene.begin(report.restored + 1)

    def meta(self) -> dict[str, Any]:
        """Return what a resumed run goes on with."""
        if not self.watchers:
            return dict(self.remembered)
        return {
            "diagnosis": self.diagnosis.meta(),
            **{name: watcher.meta() for name, watcher in self.watchers.items()},
        }

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Go on with it, at once or when the run starts."""
        self.remembered = meta
        if "diagnosis" in meta:
            self.diagnosis.load_meta(meta["diagnosis"])
        for name, watcher in self.watchers.items():
            if meta.get(name):
                watcher.load_meta(meta[name])
