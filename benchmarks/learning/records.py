"""What a finished run leaves behind: a line of JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean

import attrs
import cattrs

#: The training curve of a run has so many points, each the mean over as many steps.
POINTS = 20

OURS, PEER = "nanotrain", "nanoGPT"


@attrs.define(frozen=True)
class Plan:
    """A run: by what, from which recipe, with which seed."""

    who: str
    recipe: str
    seed: int
    changes: tuple[str, ...] = ()
    """``KEY=VALUE`` of the recipe."""


@attrs.define(frozen=True, kw_only=True)
class Finished:
    """What a run of a :class:`Plan` reached. Losses are in nats for a token."""

    plan: Plan
    model: str
    text: str
    """What it was trained on, and how much of it is held out."""
    steps: int
    tokens: int
    """Trained on."""
    training: tuple[float, ...]
    """Mean training loss of each twentieth of the steps."""
    validation: tuple[tuple[int, float], ...]
    """Steps, and the loss on held-out text after them. nanoGPT's has the last step only."""
    held_out: float
    """The loss on held-out text after the last step."""
    held_out_tokens: int
    bytes_per_token: float
    tokens_per_second: float
    """Median over the steps."""
    seconds: float
    """Of the whole command, with start and validation."""
    machine: str

    @property
    def bits_per_byte(self) -> float:
        """Bits that held-out text needs for each of its bytes."""
        return self.held_out / self.bytes_per_token / 0.6931471805599453


def read(file: Path) -> list[Finished]:
    """Return the runs of a file of lines of JSON."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return [cattrs.structure(json.loads(line), Finished) for line in lines]


def append(file: Path, run: Finished) -> None:
    """Add a line."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(attrs.asdict(run)) + "\n")


def twentieths(losses: Sequence[float]) -> tuple[float, ...]:
    """Return the mean of each twentieth of the steps, or each step where there are fewer."""
    points = min(POINTS, len(losses))
    edges = [len(losses) * point // points for point in range(points + 1)]
    return tuple(mean(losses[first:last]) for first, last in pairwise(edges))
