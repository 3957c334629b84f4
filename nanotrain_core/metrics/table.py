"""The positions of published names in the buffers that ranks reduce, the same on every rank, and the sums of
this rank that are added up at them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress

from nanotrain_core.metrics.gathered import Spec


class Table:
    """Names in order of position. No name is added to it: new names make a new table."""

    def __init__(self, specs: Iterable[Spec] = (), begun: Sequence[float] = ()) -> None:
        """``begun``: the first sums of a step under way."""
        self.places: dict[str, tuple[int, int, Spec]] = {}
        """For each name the position of its maximum, that of its first sum, and its declaration."""
        self.width = 0
        """The number of sums of all names."""
        self._counters: list[int] = []
        for spec in specs:
            self.places[spec.name] = len(self.places), self.width, spec
            self._counters.append(-1 if spec.counter is None else self.width + spec.counter)
            self.width += spec.width
        self._empty = array("d", [0.0] * self.width + [-math.inf] * len(self.places))
        self.sums = array("d", begun) + self._empty[len(begun) :]
        """Sums and maxima of the step under way, float64: numbers of means and of ranks, which are most, are
        added here at once."""

    def take(self) -> array[float]:
        """Return the sums and maxima of a step, and begin another."""
        taken, self.sums = self.sums, self._empty[:]
        return taken

    def get(self, name: str) -> Spec | None:
        """Return the declaration of a name, None if it has no position."""
        place = self.places.get(name)
        return place[2] if place else None

    def published(self, numbers: Sequence[float]) -> Iterator[tuple[int, int, Spec]]:
        """Return the :attr:`places` of names that any rank published, as far as one of their sums shows that.

        Most names of a run are published in few of its steps.

        Args:
            numbers: sums of all names.
        """
        return compress(self.places.values(), map([*numbers, 1.0].__getitem__, self._counters))

    def adopt(self, spec: Spec) -> None:
        """Replace a declaration by this rank's equal one, so that an identity check suffices later."""
        self.places[spec.name] = *self.places[spec.name][:2], spec
