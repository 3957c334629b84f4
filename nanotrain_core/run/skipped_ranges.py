"""Ranges of the data that a run leaves out, counted from its beginning."""

from __future__ import annotations

from abc import ABC, abstractmethod


class SkipsRanges(ABC):
    """What the feeds of recipes and of scripts have in common: a position, and ranges that are left out.

    Both count the same items: sequences of the whole run, or batches of a script's loader.
    """

    taken = 0
    """Items used since the beginning of the run, including skipped ones."""
    skipped: list[tuple[int, int]]
    """Ranges of these that are not trained on."""

    @abstractmethod
    def size_before(self, position: int) -> int:
        """Return how many items the step used that ends at a position."""

    def is_skipped(self, position: int, size: int) -> bool:
        """Return whether any of the items of a step at ``position`` is in a skipped range."""
        return any(first < position + size and position < end for first, end in self.skipped)

    def of_last(self, steps: int) -> tuple[int, int]:
        """Return which items the last ``steps`` steps used, including those they skipped."""
        first = self.taken
        while steps and first > 0:
            size = self.size_before(first)
            first -= size
            steps -= 0 if self.is_skipped(first, size) else 1
        return max(first, 0), self.taken
