"""A shuffled order of any length that needs no memory: a Feistel network with cycle walking.

Sources: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002 (a Feistel network over the
digits of a number, and cycle walking); the round function is the finalizer of SplitMix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

import hashlib
from math import isqrt

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

#: Of the network. Four make a pseudorandom permutation of a large domain; small ones take more to be mixed.
ROUNDS = 8


class Permutation:
    """Every number below ``count`` once, in an order that ``key`` decides."""

    def __init__(self, count: int, key: str) -> None:
        self.count = count
        self._side = np.uint64(isqrt(max(count - 1, 0)) + 1)  # numbers are two digits of this base
        words = np.frombuffer(hashlib.sha512(key.encode()).digest(), "<u8")
        self._keys = [np.uint64(word) for word in words[:ROUNDS]]

    def at(self, places: Integers) -> Integers:
        """Return the numbers that stand at ``places``, [n], each from 0 up to ``count``.

        Raises:
            ValueError: there are none; walking would not end.
        """
        if not self.count and places.size:
            raise ValueError("a permutation of no numbers has no places")
        found = self._shuffled(places.astype(np.uint64))
        # The domain is a square, up to twice the root larger than the count: what falls outside walks on.
        while (outside := np.flatnonzero(found >= self.count)).size:
            found[outside] = self._shuffled(found[outside])
        return found.astype(np.int64)

    def _shuffled(self, numbers: _Words) -> _Words:
        high, low = np.divmod(numbers, self._side)
        for key in self._keys:
            high, low = low, (high + _mixed(low + key) % self._side) % self._side
        return high * self._side + low


class WindowedPermutation:
    """Every number below ``count`` once; those of a window of consecutive ones stay together.

    Windows are in an order of their own, and numbers in one of each window. What does not fill a window
    comes last.
    """

    def __init__(self, count: int, key: str, window: int) -> None:
        self.count, self.window, self._key = count, window, key
        self._whole = count // window
        self._windows = Permutation(self._whole, f"{key}/windows")

    def at(self, places: Integers) -> Integers:
        """Return the numbers that stand at ``places``, [n], each from 0 up to ``count``."""
        found = np.empty_like(places)
        windows, within = np.divmod(places, self.window)
        for place in np.unique(windows).tolist():
            there = windows == place
            number = int(self._windows.at(np.array([place]))[0]) if place < self._whole else place
            size = min(self.window, self.count - number * self.window)
            shuffled = Permutation(size, f"{self._key}/{number}").at(within[there])
            found[there] = number * self.window + shuffled
        return found


def _mixed(words: _Words) -> _Words:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
