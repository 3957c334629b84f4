"""The ``pipeline`` monitor: the measured pipeline bubble, and the ideal one of the schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from nanotrain_core.api import Action, simulate
from nanotrain_core.api.torch import MetricsReport, Monitor, RunInfo, StepReport, UpdateReport
from nanotrain_performance import PipelineConfig
from nanotrain_performance.windows import percentile

PASSES = "forward and backward"
WORK = (PASSES, "gradient sync", "optimizer")
#: Steps over which the median work of a rank is taken: one that is slow in a few steps is not a slow rank.
WINDOW = 15
FEW = 7


class Pipeline(Monitor):
    """Publishes in logged steps. Without a pipeline, how unevenly ranks work."""

    reads_weights = False

    def __init__(self, config: PipelineConfig) -> None:
        del config  # it has no keys

    def on_start(self, run: RunInfo) -> None:
        """Begin to measure."""
        self.run = run
        self.rank = run.mesh.coordinate("pp") if len(run.schedule) > 1 else None
        self.schedule: Sequence[Sequence[Action]] | None = None
        run.progress.time_device(run.device)
        self.passes = run.progress.measured_in(PASSES)
        self.before: float | None = None
        self.window: deque[float] = deque(maxlen=WINDOW)

    def on_before_update(self, update: UpdateReport) -> None:
        """Look at this rank's own work from this point of the last step."""
        now = self.run.progress.work(*WORK)
        if self.before is not None:
            self.window.append((now - self.before) / max(self.run.pipeline_share, 0.1))
        self.before = now

    def on_step(self, report: StepReport) -> None:
        """Publish the bubble of this rank's stages, and its own work."""
        now = self.run.progress.measured_in(PASSES)
        if self.rank is not None:
            passes, name = now.since(self.passes), f"rank-{self.rank}"
            if passes.seconds > 0:
                self.run.metrics.scalar(f"pipeline/bubble/measured/{name}", passes.messages / passes.seconds)
                self.run.metrics.scalar(f"pipeline/bubble/ideal/{name}", self._ideal(self.rank))
        self.passes = now
        if self.run.world_size > 1 and len(self.window) >= FEW:
            self.run.metrics.per_rank("pipeline/work/{over}", percentile([*self.window], 0.5))

    def _ideal(self, rank: int) -> float:
        """Simulate the schedule, again where a phase has changed it."""
        now = self.run.current_schedule()
        if now is not self.schedule:
            self.schedule, self.ideal = now, simulate(now).bubble(rank)
        return self.ideal

    def on_metrics(self, report: MetricsReport) -> None:
        """Publish with the next logged step how far the slowest rank is above the others."""
        median = report.values.get("pipeline/work/median", 0.0)
        if median > 0:
            self.run.metrics.scalar("pipeline/skew", report.values["pipeline/work/max"] / median)
