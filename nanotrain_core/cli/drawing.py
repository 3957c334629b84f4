"""Draws a timeline as text: one row for each rank, one cell for each unit of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from string import ascii_lowercase

from nanotrain_core.pipeline.actions import Action
from nanotrain_core.pipeline.simulator import TimedAction, Timeline

HEADER = "rank   idle  held  "

LEGEND = """\
F forward, B backward, W weight gradients: one unit of time each; a long B makes the weight gradients itself.
A number is a microbatch{letters}. idle: share of the time in which a rank waits.
held: most microbatches whose activations a rank holds at once{counted}."""


def draw(timeline: Timeline, width: int | None = None) -> Iterator[str]:
    """Yield the lines of a drawing, wrapped to ``width`` columns if given.

    The timeline's times are integers.
    """
    letters = {
        stage: letter for rank in range(len(timeline.rows)) for stage, letter in _letters(timeline, rank)
    }
    labels = [[_label(slot.action, letters) for slot in row] for row in timeline.rows]
    cell = 1 + max((len(label) for row in labels for label in row), default=1)
    units = round(timeline.makespan)
    bars = [_bar(row, texts, cell, units) for row, texts in zip(timeline.rows, labels, strict=True)]
    at_once = units if width is None else max(1, (width - len(HEADER)) // cell)
    for first in range(0, units, at_once):
        if first:
            yield ""
        yield HEADER.rstrip()
        for rank, bar in enumerate(bars):
            piece = bar[first * cell : (first + at_once) * cell].rstrip()
            yield f"{rank:4} {timeline.bubble(rank):6.1%} {timeline.peak(rank):5}  {piece}"
    yield ""
    several = any(letters.values())
    yield LEGEND.format(
        letters=", a letter which of its rank's stages" if several else "",
        counted=", counted for each stage" if several else "",
    )


def _letters(timeline: Timeline, rank: int) -> Iterator[tuple[int, str]]:
    """Yield (stage, letter) of a rank: none where it has only one."""
    stages = timeline.stages(rank)
    for index, stage in enumerate(stages):
        yield stage, ascii_lowercase[index % len(ascii_lowercase)] if len(stages) > 1 else ""


def _label(action: Action, letters: dict[int, str]) -> str:
    return f"{action.kind}{action.microbatch}{letters[action.stage]}"


def _bar(row: Sequence[TimedAction], labels: Sequence[str], cell: int, units: int) -> str:
    """Return a rank's cells: an action of several units is extended with dashes, an idle unit is a dot."""
    free = ".".ljust(cell)
    bar = ""
    for slot, label in zip(row, labels, strict=True):
        bar += free * (round(slot.start) - len(bar) // cell)
        length = round(slot.end - slot.start)
        bar += (label.ljust(length * cell - 1, "-") if length > 1 else label).ljust(length * cell)
    return bar + free * (units - len(bar) // cell)
