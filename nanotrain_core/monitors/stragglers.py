"""The ``stragglers`` monitor: finds ranks that make others wait, the phase in which they do, and slow links.

All ranks of a run take the same time for a step: the slow one works, the others wait for it. So each
rank's own work is compared, a phase's time minus its communication: the slow rank is the one that
waits least, in any phase and whatever else is running, such as a checkpoint in progress. The
transfer itself counts as waiting on both of its ends; links are compared separately.
"""

from __future__ import annotations

import socket

import attrs
import structlog

from nanotrain_core.builtin.configs import StragglersConfig
from nanotrain_core.builtin.stragglers import PHASES, SAID
from nanotrain_core.contracts import MetricsReport, Monitor, RollbackReport, RunInfo, StepReport
from nanotrain_core.monitors.links import seconds_from_neighbor

#: The phases that are compared, and of each the parts that the engine times.
PARTS = {
    "data": ("data",),
    "compute": ("forward and backward", "gradient sync", "optimizer"),
    "monitors": ("monitors",),
}


@attrs.define(frozen=True)
class Found:
    """A rank that is far slower than the others in one phase."""

    phase: str
    rank: int
    seconds: float
    others: float
    """The lower median of all ranks: with two, the faster one's value."""


class Stragglers(Monitor):
    """Warns, on rank 0, of a rank or a link that is slow in several consecutive comparisons."""

    reads_weights = False

    def __init__(self, config: StragglersConfig) -> None:
        self.config = config
        self.suspects: dict[str, tuple[tuple[str, int], int]] = {}
        """For work and for links: phase and rank, and the number of consecutive comparisons that found
        them."""

    def on_start(self, run: RunInfo) -> None:
        """Begin to measure, and gather the ranks' hosts. Collective."""
        self.run = run
        self.places: list[tuple[str, str]] = run.mesh.gather((socket.gethostname(), str(run.device)))
        run.progress.time_device(run.device)
        self.before, self.step = run.progress.measured(), run.first_step

    def on_step(self, report: StepReport) -> None:
        """Publish how long this rank worked in each phase, and how long its neighbor's message took."""
        if report.step % self.config.every == 0:
            now, steps = self.run.progress.measured(), max(1, report.step - self.step)
            for phase, parts in PARTS.items():
                spent = [now[part].since(self.before.get(part)).busy for part in parts if part in now]
                share = max(self.run.pipeline_share, 0.1) if phase == "compute" else 1.0
                self.run.metrics.per_rank(f"stragglers/{phase}/{{over}}", sum(spent) / steps / share)
            self.before, self.step = now, report.step
        if self.config.links and report.step % self.config.links == 0 and self.run.world_size > 1:
            self.run.metrics.per_rank("stragglers/link/{over}", seconds_from_neighbor(self.run.mesh))

    def on_rollback(self, report: RollbackReport) -> None:
        """Restart the comparison after a rollback."""
        self.before, self.step = self.run.progress.measured(), report.restored

    def on_metrics(self, report: MetricsReport) -> None:
        """Compare."""
        for kind, phases in (("work", PHASES[:-1]), ("link", PHASES[-1:])):
            slow_phases = [
                Found(
                    phase,
                    int(report.values[f"{name}/rank"]),
                    report.values[f"{name}/max"],
                    report.values[f"{name}/median"],
                )
                for phase in phases
                if (name := f"stragglers/{phase}") + "/max" in report.values
            ]
            if slow_phases:
                self._judge(kind, slowest(slow_phases, self.config.ratio, self.config.least), report.step)

    def _judge(self, kind: str, found: Found | None, step: int) -> None:
        """Report a suspect found for the ``patience``-th consecutive time."""
        if found is None:
            self.suspects.pop(kind, None)
            return
        suspect = (found.phase, found.rank)
        before, times = self.suspects.get(kind, (suspect, 0))
        times = times + 1 if before == suspect else 1
        self.suspects[kind] = suspect, times
        if times != self.config.patience:
            return
        text = f"rank {found.rank} is slow: others wait for its {found.phase}"
        if found.phase == "link":
            sender = (found.rank - 1) % self.run.world_size
            text = f"the link from rank {sender} to rank {found.rank} is slow"
        host, device = self.places[found.rank]
        self.run.metrics.text(
            SAID, f"step {step}: {text}, {found.seconds:.3g} s against {found.others:.3g} s."
        )
        if self.run.rank == 0:
            structlog.get_logger("nanotrain.stragglers").warning(
                text,
                step=step,
                host=host,
                device=device,
                seconds=f"{found.seconds:.4f}",
                others=f"{found.others:.4f}",
            )


def slowest(slow_phases: list[Found], ratio: float, least: float) -> Found | None:
    """Return the phase in which a rank is furthest above the others, if it is far above.

    Args:
        slow_phases: for each phase, the slowest rank.
        ratio: how many times the others' seconds are far.
        least: minimum seconds above the others' to report.
    """
    found = max(slow_phases, key=lambda each: each.seconds - each.others)
    far = found.seconds - found.others > least and found.seconds > ratio * found.others
    return found if far else None
