"""The values in force after a number of tokens: a function of that number alone, the same on every layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from nanotrain_core.recipe.phase import Ramp

if TYPE_CHECKING:
    from nanotrain_core.recipe.tree import BatchConfig, Recipe

Number = int | float
#: A value that a phase changes: a number, or the config of a table.
Value = Any


@attrs.define(frozen=True)
class Moment:
    """The values with which a step is taken."""

    number: int
    """Index of the phase, from 0."""
    values: Mapping[str, Value]
    """Each key that any phase changes, with its current value."""


@attrs.define(frozen=True)
class Stretch:
    """Consecutive steps of one phase with batches of one size."""

    phase: int
    sequences: int
    """Sequences of each batch."""
    length: int
    """Tokens of each sequence."""
    steps: int
    begins: int
    """Tokens before its first step."""

    @property
    def tokens(self) -> int:
        """Tokens of all its steps."""
        return self.steps * self.sequences * self.length


@attrs.define(frozen=True)
class Span:
    """One phase with every value written out."""

    begins: int
    ends: int | None
    values: Mapping[str, Value]
    """Values at its first token."""
    ramps: Mapping[str, Ramp]

    def at(self, tokens: int) -> dict[str, Value]:
        """Return the values after this many tokens of the run."""
        if not self.ramps:
            return dict(self.values)
        assert self.ends is not None
        progress = min(1.0, (tokens - self.begins) / (self.ends - self.begins))
        return {**self.values, **{key: self._ramped(key, progress) for key in self.ramps}}

    def _ramped(self, key: str, progress: float) -> Number:
        start = self.values[key]
        value = self.ramps[key].at(progress, start)
        return round(value) if isinstance(start, int) else value


class PhaseTimeline:
    """The phases of a recipe along the tokens of its run.

    A whole step uses the values at its first token. So a phase ends with the first step that
    reaches its ``until_tokens``, and the value of a ramp depends on tokens, not on steps.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.spans: list[Span] = []
        values = {key: value_of(recipe, key) for phase in recipe.phase for key in phase.changes}
        begins = 0
        for phase in recipe.phase:
            ramps = {key: value for key, value in phase.changes.items() if isinstance(value, Ramp)}
            ends = phase.until_tokens
            first = dict(values)
            for key, value in phase.changes.items():
                if not isinstance(value, Ramp):
                    first[key] = value
                elif value.start is not None:
                    first[key] = type(first[key])(value.start)
            self.spans.append(Span(begins, ends, first, ramps))
            values = first | {key: type(first[key])(ramp.end) for key, ramp in ramps.items()}
            begins = ends or begins
        self._after = values

    def at(self, tokens: int) -> Moment:
        """Return the values for the next step, after this many tokens."""
        for number, span in enumerate(self.spans):
            if span.ends is None or tokens < span.ends:
                return Moment(number, span.at(tokens))
        return Moment(max(0, len(self.spans) - 1), self._after)

    def recipe_with(self, values: Mapping[str, Value]) -> Recipe:
        """Return the recipe without phases, with these ``values``."""
        changed: dict[str, dict[str, Value]] = {}
        for key, value in values.items():
            section, _, name = key.partition(".")
            changed.setdefault(section, {})[name] = value
        sections: dict[str, Any] = {}
        for section, fields in changed.items():
            old = getattr(self.recipe, section)
            if section == "batch":
                sections[section] = attrs.evolve(old, **fields)
            else:
                sections[section] = attrs.evolve(old, config=attrs.evolve(old.config, **fields))
        return attrs.evolve(self.recipe, phase=(), **sections)

    def corners(self) -> Iterator[tuple[int, Recipe]]:
        """Yield the recipes in force at the beginning of each phase, and at the end of one with ramps."""
        for number, span in enumerate(self.spans):
            yield number, self.recipe_with(span.values)
            if span.ramps and span.ends is not None:
                yield number, self.recipe_with(span.at(span.ends))

    def reached_corners(self, steps: int) -> Iterator[tuple[int, Recipe]]:
        """Yield the recipes of the first step of each phase, and of the last step of one with ramps.

        Only phases and values that a run of ``steps`` steps reaches: it may end within a ramp.
        """
        last: dict[int, int] = {}
        for each in self.stretches(steps) if self.spans else ():
            last[each.phase] = each.begins + (each.steps - 1) * each.sequences * each.length
        for number, tokens in last.items():
            yield number, self.recipe_with(self.spans[number].values)
            if self.spans[number].ramps:
                yield number, self.recipe_with(self.at(tokens).values)

    def ramps(self) -> Iterator[tuple[int, range]]:
        """Yield the phases whose batch size is ramped, with the sizes between those of its corners."""
        for number, span in enumerate(self.spans):
            ramp = span.ramps.get("batch.sequences")
            if ramp is not None:
                first, last = int(span.values["batch.sequences"]), int(ramp.end)
                by = int(ramp.by or 1) * (1 if last > first else -1)
                yield number, range(first + by, last, by)

    def with_batch(self, number: int, sequences: int) -> Recipe:
        """Return the recipe at the beginning of a phase, if it has phases, but with batches of this size."""
        values = self.spans[number].values if self.spans else {}
        return self.recipe_with({**values, "batch.sequences": sequences})

    def largest(self) -> Recipe:
        """Return the recipe of the phase with the largest microbatches, among those that the steps reach.

        It is the one with the most tokens in a microbatch and, among these, the most in a step. In a pipeline
        another phase may need more memory, with more microbatches in flight.
        """
        found = [recipe for _, recipe in self.reached_corners(self.recipe.run.steps)] or [self.recipe]
        return max(
            found, key=lambda recipe: (recipe.batch.microbatch * recipe.batch.length, recipe.batch.tokens)
        )

    def batch_at(self, values: Mapping[str, Value]) -> BatchConfig:
        """Return ``[batch]`` with these values of its keys."""
        return self.recipe_with(values).batch

    def lengths(self) -> tuple[int, ...]:
        """Return the sequence lengths of all phases, the first one first."""
        found = (recipe.batch.length for recipe in (self.recipe, *(now for _, now in self.corners())))
        return tuple(dict.fromkeys(found))

    def validated_at(self, number: int) -> BatchConfig:
        """Return the batch shape with which a run validates during a phase.

        It is ``[batch]``, so that all evaluations see the same sequences; after a phase that changes
        their length it is the first batch of that phase.
        """
        batches = [self.recipe.batch, *(self.batch_at(span.values) for span in self.spans[: number + 1])]
        found = batches[0]
        for batch in batches[1:]:
            same = batch.length == found.length
            found = attrs.evolve(found, microbatch=batch.microbatch) if same else batch
        return found

    def batches(self, tokens: int) -> Iterator[BatchConfig]:
        """Yield the batches of the steps after this many tokens, without end."""
        while True:
            yield (batch := self.batch_at(self.at(tokens).values))
            tokens += batch.tokens

    # --- steps --------------------------------------------------------------------------------

    @property
    def ends(self) -> int | None:
        """Tokens at which the last phase ends; None without phases, or if the last one has no end."""
        return self.spans[-1].ends if self.spans else None

    def stretches(self, steps: int | None = None) -> Iterator[Stretch]:
        """Yield the steps of a run from its beginning: ``steps`` of them, or the total of all phases."""
        tokens, left = 0, steps
        last = self.ends
        while (left is None and last is not None and tokens < last) or (left is not None and left > 0):
            moment = self.at(tokens)
            batch = self.batch_at(moment.values)
            count = self._steps_alike(moment.number, tokens, batch, left)
            yield Stretch(moment.number, batch.sequences, batch.length, count, tokens)
            tokens += count * batch.tokens
            left = None if left is None else left - count

    def reached(self, steps: int) -> int:
        """Return how many of the phases a run of ``steps`` steps reaches."""
        return 1 + max(stretch.phase for stretch in self.stretches(steps))

    def ended(self, steps: int) -> int:
        """Return how many of a run's first ``steps`` steps belong to phases that have ended."""
        inside = (
            each.steps for each in self.stretches(steps) if self.ends is None or each.begins < self.ends
        )
        return sum(inside)

    def _steps_alike(self, number: int, tokens: int, batch: BatchConfig, most: int | None) -> int:
        """Return how many steps of ``batch`` follow until the phase ends or its batch changes."""
        last_of_all = number == len(self.spans) - 1 and (self.ends is None or tokens >= self.ends)
        if not self.spans or last_of_all:
            assert most is not None
            return most
        ends, each, size = self.spans[number].ends, batch.tokens, batch.sequences
        assert ends is not None
        least, end = 1, -(-(ends - tokens) // each)
        if "batch.sequences" in self.spans[number].ramps:
            jump = 1
            while least + jump < end and self._size(tokens + (least + jump - 1) * each) == size:
                least, jump = least + jump, 2 * jump
            above = min(end, least + jump)
            while least < above:  # the first ``least`` steps are equal, and at most ``above`` of them
                middle = (least + above + 1) // 2
                alike = self._size(tokens + (middle - 1) * each) == size
                least, above = (middle, above) if alike else (least, middle - 1)
            end = least
        return end if most is None else min(end, most)

    def _size(self, tokens: int) -> int:
        return int(self.at(tokens).values["batch.sequences"])  # set by a phase that changes it


def value_of(recipe: Recipe, key: str) -> Value:
    """Return the recipe's value of a dotted key, ``optimizer.lr``."""
    section, _, name = key.partition(".")
    table: Any = getattr(recipe, section)
    return getattr(table if section == "batch" else table.config, name)
