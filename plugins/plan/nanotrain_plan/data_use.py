"""How much of its data a run takes, and where in it the run ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from nanotrain_core.api import PhaseStretch, PhaseTimeline, Recipe, Registry, surveys
from nanotrain_core.api.torch import SequenceData


@attrs.define(frozen=True, kw_only=True)
class DataPosition:
    """Where a run ends in its data: counts that its last checkpoint has, under the same names."""

    taken: int
    """Sequences since the beginning of the run."""
    length: int
    """Tokens of the last of them."""
    position: int | None = None
    """Sequences of that length that are behind it; None: known only when the data is opened."""
    train: int | None = None
    """Sequences of that length in an epoch."""

    @property
    def epoch(self) -> int | None:
        """The epoch that the next sequence is of, from 0."""
        return self.position // self.train if self.position is not None and self.train else None

    @property
    def sequence(self) -> int | None:
        """The number of the next sequence in that epoch, from 0."""
        return self.position % self.train if self.position is not None and self.train else None


@attrs.define(frozen=True, kw_only=True)
class DataUse:
    """Of a whole run."""

    tokens_per_step: int
    """Of the largest batch."""
    tokens: int
    sequences: int | None
    """There are, as far as is known before the data is opened."""
    epochs: float | None
    position: DataPosition


def data_use(recipe: Recipe, registry: Registry) -> DataUse:
    """Return how much of the data the run takes."""
    timeline = PhaseTimeline(recipe)
    known = {length: survey.train for length, survey in surveys(recipe, registry).items()}
    stretches = [*timeline.stretches(recipe.run.steps)]
    parts = [(each.steps * each.sequences, known[each.length]) for each in stretches]
    return DataUse(
        tokens_per_step=timeline.largest().batch.tokens,
        tokens=sum(each.tokens for each in stretches),
        sequences=known[recipe.batch.length],
        epochs=sum(taken / there for taken, there in parts if there) if all(n for _, n in parts) else None,
        position=_position(recipe, registry, stretches, known),
    )


def _position(
    recipe: Recipe, registry: Registry, stretches: Sequence[PhaseStretch], known: Mapping[int, int | None]
) -> DataPosition:
    """Return where the run ends: by the steps of data that keeps a position, without its sequences.

    How a position is carried over to sequences of another length is not known of other data.
    """
    taken, length = sum(each.steps * each.sequences for each in stretches), stretches[-1].length
    lengths = {each.length for each in stretches}
    kind: Any = registry.get("data", recipe.data.use).load() if len(lengths) > 1 else SequenceData
    keeps_position = isinstance(kind, type) and issubclass(kind, SequenceData)
    if not keeps_position or not all(known[each] for each in lengths):
        return DataPosition(taken=taken, length=length)
    data = SequenceData()
    data.position_in_tokens = kind.position_in_tokens
    for each in stretches:
        train = known[each.length] or 0
        if each is stretches[0]:
            data.prepare(length=each.length, seed=0, train=train, validation=0, fingerprint="")
        elif each.length != data.length:
            data.prepare_length(each.length, train=train, validation=0)
        data.skip(each.steps * each.sequences)
    return DataPosition(taken=taken, length=length, position=data.position, train=data.train)
