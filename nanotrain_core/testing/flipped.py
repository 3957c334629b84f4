"""Trains, flips one bit of one rank's weights between two steps, and reports the result."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from nanotrain_core.compose import Run
from nanotrain_core.contracts import Monitor, RunInfo, StepReport
from nanotrain_core.errors import Corrupted
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.probe import make_engine

#: An integer type with as many bytes as a number has.
INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@attrs.define(frozen=True)
class Flip:
    """Which bit is flipped, and when."""

    after: int
    """The step after which, before anything is saved; 0: when the run starts, after it was restored."""
    rank: int
    own: bool = True
    """Whether of a number that this rank updates, or of one that another rank updates for it."""
    bit: int = 0
    """Counted from the least significant one."""


@attrs.define(frozen=True)
class Found:
    """The observations of one rank."""

    text: str | None
    """What the run ended with; None if nothing was found."""
    flipped: str | None
    """The parameter, on the rank that has the bit."""


class Flipping(Monitor):
    """Flips the bit."""

    every_step = True

    def __init__(self, run: Run, flip: Flip) -> None:
        self.run, self.flip = run, flip
        self.flipped: str | None = None

    def on_start(self, run: RunInfo) -> None:
        """Flip a bit of what was initialized or restored."""
        self._flip_after(0)

    def on_step(self, report: StepReport) -> None:
        """Flip a bit of what the step left."""
        self._flip_after(report.step)

    def _flip_after(self, step: int) -> None:
        if (step, self.run.mesh.rank) == (self.flip.after, self.flip.rank):
            name, number = find(self.run, own=self.flip.own)
            number ^= 1 << self.flip.bit
            self.flipped = name


def find(run: Run, *, own: bool) -> tuple[str, torch.Tensor]:
    """Return an element that this rank updates, or does not: the parameter's name, and its bits [1]."""
    for placed in run.placed:
        flat = placed.parameter.detach().view(-1)
        updated = torch.zeros(len(flat), dtype=torch.bool)
        for piece in run.gradients.pieces():
            if piece.parameter is placed.parameter:
                updated[slice(*(piece.span or (0, len(flat))))] = True
        places = (updated == own).nonzero().view(-1).tolist()
        if places:
            return placed.placement.name, flat.view(INTEGER[flat.element_size()])[places[-1] :][:1]
    raise ValueError(f"rank {run.mesh.rank} has no weight that it does {'' if own else 'not '}update")


def train_flipped(
    case: Case,
    changes: Mapping[str, Any],
    flip: Flip,
    *,
    folder: Path | None = None,
    resume: str | None = None,
) -> Found:
    """Train all steps of the case's recipe, whose monitors should detect the flip."""
    engine = make_engine(case, changes, folder=folder, resume=resume)
    flipping = Flipping(engine.run, flip)
    engine.events.monitors = [*engine.events.monitors, flipping]
    try:
        engine.fit()
    except Corrupted as problem:
        return Found(str(problem), flipping.flipped)
    return Found(None, flipping.flipped)
