"""The positions of published names in the buffers that ranks reduce: the same on every rank."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable

from nanotrain_core.metrics.gathered import Spec


class Table:
    """Names in order of position. No name is added to it: new names make a new table."""

    def __init__(self, specs: Iterable[Spec] = ()) -> None:
        self.places: dict[str, tuple[int, int, Spec]] = {}
        """For each name the position of its maximum, that of its first sum, and its declaration."""
        self.width = 0
        """The number of sums of all names."""
        for spec in specs:
            self.places[spec.name] = len(self.places), self.width, spec
            self.width += spec.width
        self.empty = array("d", [0.0] * self.width + [-math.inf] * len(self.places))
        """Sums and maxima where nothing is published, float64."""

    def get(self, name: str) -> Spec | None:
        """Return the declaration of a name, None if it has no position."""
        return self.places[name][2] if name in self.places else None

    def __contains__(self, spec: Spec) -> bool:
        """Return whether this declaration has a position."""
        known = self.get(spec.name)
        return known is spec or known == spec  # most are this rank's own, and comparing others takes longer

    def adopt(self, spec: Spec) -> None:
        """Replace a declaration by this rank's equal one, so that an identity check suffices later."""
        self.places[spec.name] = *self.places[spec.name][:2], spec
