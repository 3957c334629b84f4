"""The ``stragglers`` monitor: which rank makes the others wait, and in what?

All ranks of a run take the same time for a step: the slow one works, the others wait for it. What tells
them apart is where the time goes, so the phases in which a rank never waits for another are compared,
by the clock of each host. Forward and backward are not: there ranks wait for each other's gradients and
stages, and a long time may be another's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import structlog

from nanotrain_core.builtin.configs import StragglersConfig
from nanotrain_core.contracts import Monitor, RunInfo, StepReport

#: Phases that do not wait for other ranks.
PHASES = ("data", "monitors")


class Stragglers(Monitor):
    """Warns, on rank 0, of a rank that is slow in one phase for several comparisons in a row."""

    def __init__(self, config: StragglersConfig) -> None:
        self.config = config
        self.suspect: tuple[int, str] | None = None
        self.seen = 0
        """Comparisons in a row that found the same suspect."""

    def on_start(self, run: RunInfo) -> None:
        """Begin to count."""
        self.run = run
        self.before, self.step = dict(run.progress.seconds), run.first_step

    def on_step(self, report: StepReport) -> None:
        """Compare the seconds a step of this rank with those of the others."""
        if report.step % self.config.every:
            return
        now, steps = dict(self.run.progress.seconds), report.step - self.step
        mine = {p: (now.get(p, 0.0) - self.before.get(p, 0.0)) / max(1, steps) for p in PHASES}
        self.before, self.step = now, report.step
        everyone = self.run.mesh.gather(mine)
        found = slowest(everyone, self.config.ratio, self.config.least)
        self.seen = self.seen + 1 if found is not None and found == self.suspect else int(found is not None)
        self.suspect = found
        if found is not None and self.seen == self.config.patience and self.run.rank == 0:
            rank, phase = found
            structlog.get_logger("nanotrain.stragglers").warning(
                f"rank {rank} is slow: others wait for its {phase}",
                step=report.step,
                seconds=f"{everyone[rank][phase]:.4f}",
                others=f"{usual([each[phase] for each in everyone]):.4f}",
            )


def slowest(everyone: Sequence[Mapping[str, float]], ratio: float, least: float) -> tuple[int, str] | None:
    """Return the rank and the phase in which it is furthest above the others, if it is far above.

    Args:
        everyone: seconds a step by phase, of every rank.
        ratio: how many times the others' seconds are far.
        least: seconds above the others' that are worth a word.
    """
    excess = {
        (rank, phase): seconds - usual([each[phase] for each in everyone])
        for rank, mine in enumerate(everyone)
        for phase, seconds in mine.items()
    }
    rank, phase = max(excess, key=excess.__getitem__)
    seconds, above = everyone[rank][phase], excess[rank, phase]
    return (rank, phase) if above > least and seconds > ratio * (seconds - above) else None


def usual(seconds: Sequence[float]) -> float:
    """Return the lower median: of two ranks, the faster one's."""
    return sorted(seconds)[(len(seconds) - 1) // 2]
