"""Which source each sample of a blend comes from, for any sample, without a table.

Sources are the leaves of a binary tree. After n samples of a node of weight W its left child, of weight L,
has had floor(n L / W + 1/2) of them, and the right child the rest. So of two sources each has had its share
rounded to nearest, after any number of samples. Of more, roundings on the way to a leaf add up to at most
:meth:`Blend.bounds`. The tree is Huffman's, in which small weights lie deep: that keeps the bounds small.

Megatron-LM's ``build_blending_indices`` keeps to shares as closely, with a table of an entry for each sample.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import attrs
import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

#: What weights add up to at most: products of two such numbers fit into 63 bits.
MOST = 2**30


@attrs.define(frozen=True)
class _Node:
    weight: int
    source: int = -1
    left: _Node | None = None
    right: _Node | None = None

    def of_left(self, samples: Integers) -> Integers:
        """Return how many of the first ``samples`` of this node its left child has had."""
        assert self.left is not None
        rounds, rest = np.divmod(samples, self.weight)
        found: Integers = (2 * rest * self.left.weight + self.weight) // (2 * self.weight)
        found += rounds * self.left.weight
        return found


class Blend:
    """Samples of several sources, in proportion to whole numbers."""

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights = tuple(weights)
        heap = [(weight, number, _Node(weight, number)) for number, weight in enumerate(weights)]
        heapq.heapify(heap)
        for number in range(len(weights), 2 * len(weights) - 1):
            (_, _, right), (_, _, left) = heapq.heappop(heap), heapq.heappop(heap)
            weight = left.weight + right.weight
            heapq.heappush(heap, (weight, number, _Node(weight, left=left, right=right)))
        self._root = heap[0][2]

    def at(self, samples: Integers) -> tuple[Integers, Integers]:
        """Return the source of each sample, and how many samples of that source come before it: both [n]."""
        sources, before = np.empty_like(samples), np.empty_like(samples)
        waiting = [(self._root, np.arange(len(samples)), samples)]
        while waiting:
            node, rows, numbers = waiting.pop()
            if node.left is None or node.right is None:
                sources[rows], before[rows] = node.source, numbers
                continue
            had = node.of_left(numbers)
            left = node.of_left(numbers + 1) > had
            waiting.append((node.left, rows[left], had[left]))
            waiting.append((node.right, rows[~left], (numbers - had)[~left]))
        return sources, before

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first ``samples`` each source has had."""
        found = [0] * len(self.weights)
        waiting = [(self._root, samples)]
        while waiting:
            node, count = waiting.pop()
            if node.left is None or node.right is None:
                found[node.source] = count
                continue
            left = int(node.of_left(np.array([count]))[0])
            waiting += [(node.left, left), (node.right, count - left)]
        return found

    def bounds(self) -> list[float]:
        """Return by how much each source's count differs from its share at most, after any samples."""
        found = [0.0] * len(self.weights)
        waiting = [(self._root, 0.0)]
        while waiting:
            node, bound = waiting.pop()
            if node.left is None or node.right is None:
                found[node.source] = bound
                continue
            for child in (node.left, node.right):
                waiting.append((child, 0.5 + bound * child.weight / node.weight))
        return found


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return whole numbers in proportion to ``weights`` as they are written, which add up to 2^30 or so.

    Exactly in proportion if that is enough: 0.3 is three tenths, not the float next to it.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    common = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * common) for weight in exact]
    total = sum(whole)
    if total <= MOST:
        return whole
    return [max(1, round(Fraction(weight * MOST, total))) for weight in whole]
