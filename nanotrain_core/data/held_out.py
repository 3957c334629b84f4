"""Selects the pieces of a corpus that are held out: evenly spaced, by arithmetic, without a table."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


def held_out(count: int, fraction: float) -> int:
    """Return how many of ``count`` pieces are held out.

    At least one unless ``fraction`` is 0, if ``count`` leaves one to train on.
    """
    return min(count - 1, max(1, round(count * fraction))) if fraction and count else 0


@attrs.define(frozen=True)
class Split:
    """``count`` pieces, of which ``held`` are held out, as far apart as possible.

    The j-th held-out piece is piece (2j + 1) * count // (2 * held), whatever the seed of a run.
    """

    count: int
    held: int

    @property
    def train(self) -> int:
        """The number of training pieces."""
        return self.count - self.held

    def pieces(self, numbers: Integers, *, validation: bool) -> Integers:
        """Return the corpus indices of the given pieces of a split."""
        if not validation and not self.held:
            return numbers
        if 2 * (self.held + 1) * (self.count + 1) >= 2**63:  # otherwise a product would overflow 64 bits
            found: Integers = self._pieces(numbers.astype(object), validation).astype(np.int64)
        else:
            found = self._pieces(numbers, validation)
        return found

    def _pieces(self, numbers: Any, validation: bool) -> Any:
        if validation:
            return (2 * numbers + 1) * self.count // (2 * self.held)
        # The i-th training piece comes after those held-out ones j whose position minus j is at most i.
        before = -((self.count - 2 * self.held * (numbers + 1)) // (2 * self.train))
        return numbers + np.clip(before, 0, self.held)
