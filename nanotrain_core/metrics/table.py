"""The positions of published names in the buffers that ranks reduce, the same on every rank, and the sums of
this rank that are added up at them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import itemgetter

import attrs

from nanotrain_core.metrics.gathered import Spec

#: Sets of published names that are remembered: a run has few, but ranks may publish at any time.
MOST_SHOWN = 64

#: Position of a name's maximum, that of its first sum, and its declaration.
Place = tuple[int, int, Spec]


@attrs.define(frozen=True)
class Shown:
    """What any rank published in a step: means, which are most and are read all at once, and others."""

    means: Sequence[str]
    sums: Callable[[Sequence[float]], Sequence[float]]
    """Return of all sums those of the means, and of how much each is the mean."""
    counts: Callable[[Sequence[float]], Sequence[float]]
    others: Sequence[Place]


class Table:
    """Names in order of position. No name is added to it: new names make a new table."""

    def __init__(self, specs: Iterable[Spec] = (), of: Table | None = None) -> None:
        """``of``: the table of the step under way, whose names are the first of these."""
        self.places: dict[str, Place] = {}
        """For each name the position of its maximum, that of its first sum, and its declaration."""
        self.width = 0
        """The number of sums of all names."""
        for spec in specs:
            self.places[spec.name] = len(self.places), self.width, spec
            self.width += spec.width
        pairs = [place for place in self.places.values() if place[2].counter is not None]
        self._counted = [
            (first + (spec.counter or 0), (number, first, spec)) for number, first, spec in pairs
        ]
        self._uncounted = [place for place in self.places.values() if place[2].counter is None]
        self._counters = _getter([counter for counter, _ in self._counted])
        self._shown: dict[tuple[bytes, frozenset[int]], Shown] = {}
        self._empty = array("d", [0.0] * self.width + [-math.inf] * len(self.places))
        self.sums = self._empty[:]
        """Sums and maxima of the step under way, float64: numbers, which are most, are added here at once."""
        if of is not None:
            self.sums[: of.width] = of.sums[: of.width]
            self.sums[self.width : self.width + len(of.places)] = of.sums[of.width :]

    def take(self) -> array[float]:
        """Return the sums and maxima of a step, and begin another."""
        taken, self.sums = self.sums, self._empty[:]
        return taken

    def get(self, name: str) -> Spec | None:
        """Return the declaration of a name, None if it has no position."""
        place = self.places.get(name)
        return place[2] if place else None

    def add(self, place: Place, value: float, weight: float) -> None:
        """Add a number, see :meth:`Gathered.scalar`."""
        number, first, spec = place
        sums, reduce = self.sums, spec.metric.reduce
        if reduce == "mean":
            sums[first] += value * weight if weight else 0.0
            sums[first + 1] += weight
            return
        if reduce == "last":
            self.clear(place)
        sums[first + 1] += 1.0
        if reduce == "sum":
            sums[first] += value
        elif math.isnan(value):
            sums[first + spec.broken] += 1.0
        else:
            most = self.width + number
            sums[most] = max(sums[most], -value if reduce == "min" else value)

    def clear(self, place: Place) -> None:
        """Drop what was added for a number: a later value replaces it."""
        number, first, _ = place
        self.sums[first] = self.sums[first + 1] = 0.0
        self.sums[self.width + number] = -math.inf

    def shown(self, numbers: Sequence[float], left_out: Collection[int]) -> Shown:
        """Return the names that any rank published, as far as one of their sums shows that.

        Most names of a run are published in few of its steps, in most steps the same ones.

        Args:
            numbers: sums of all names.
            left_out: monitors whose names are not wanted.
        """
        key = bytes(map(bool, self._counters(numbers))), frozenset(left_out)
        found = self._shown.get(key)
        if found is None:
            places = [place for shown, (_, place) in zip(key[0], self._counted, strict=True) if shown]
            places = [place for place in [*places, *self._uncounted] if place[2].owner not in left_out]
            means = [(first, spec.name) for _, first, spec in places if spec.is_mean]
            firsts = [first for first, _ in means]
            if len(self._shown) == MOST_SHOWN:
                self._shown.clear()
            found = self._shown[key] = Shown(
                [name for _, name in means],
                _getter(firsts),
                _getter([first + 1 for first in firsts]),
                [place for place in places if not place[2].is_mean],
            )
        return found

    def adopt(self, spec: Spec) -> None:
        """Replace a declaration by this rank's equal one, so that an identity check suffices later."""
        self.places[spec.name] = *self.places[spec.name][:2], spec


def _getter(places: Sequence[int]) -> Callable[[Sequence[float]], Sequence[float]]:
    """Return a function that returns the numbers at ``places``."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda numbers: [numbers[place] for place in places]
