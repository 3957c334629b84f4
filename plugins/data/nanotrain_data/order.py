"""Which training sequence stands at each position: sources blended, each shuffled anew every epoch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from nanotrain_data.blend import Blend
from nanotrain_data.permutation import Permutation, WindowedPermutation

Integers = npt.NDArray[np.int64]


class BlendedOrder:
    """Source s has ``counts[s]`` sequences, numbered after those of the sources before it.

    Each is shuffled as a whole, or, with a ``window``, so that this many in a row stay together.
    """

    #: Permutations that are kept: as many as two epochs of some sources need.
    KEPT = 64

    def __init__(self, blend: Blend, counts: Sequence[int], seed: int, window: int = 0) -> None:
        self.blend, self.counts, self.seed, self.window = blend, tuple(counts), seed, window
        self._firsts = np.cumsum([0, *counts], dtype=np.int64)[:-1]
        self._known: dict[tuple[int, int], Permutation | WindowedPermutation] = {}

    def at(self, positions: Iterable[int]) -> Integers:
        """Return the sequence numbers at positions of the endless blend."""
        sources, before = self.blend.at(np.fromiter(positions, np.int64))
        numbers = np.empty_like(before)
        for source in np.unique(sources).tolist():
            rows = np.flatnonzero(sources == source)
            epochs, places = np.divmod(before[rows], self.counts[source])
            for epoch in np.unique(epochs).tolist():
                there = epochs == epoch
                numbers[rows[there]] = self._firsts[source] + self._permutation(source, epoch).at(
                    places[there]
                )
        return numbers

    def _permutation(self, source: int, epoch: int) -> Permutation | WindowedPermutation:
        known = self._known.get((source, epoch))
        if known is None:
            count, key = self.counts[source], f"{self.seed}/{source}/{epoch}"
            windowed = 0 < self.window < count
            known = WindowedPermutation(count, key, self.window) if windowed else Permutation(count, key)
            self._known = {**dict([*self._known.items()][1 - self.KEPT :]), (source, epoch): known}
        return known


class HeldOutOrder:
    """Sequences that are held out, shuffled once: the first few represent all sources."""

    def __init__(self, count: int, seed: int) -> None:
        self._permutation = Permutation(count, f"{seed}/held out")

    def at(self, positions: Iterable[int]) -> Integers:
        """Return the sequence numbers at positions below the count."""
        return self._permutation.at(np.fromiter(positions, np.int64))
