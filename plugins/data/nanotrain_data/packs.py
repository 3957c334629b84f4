"""Conversations packed into sequences: each whole in one, none cut, as few sequences as best fit finds.

Best-fit decreasing: the longest first, each where the least space is left behind it. It takes at most 11/9
of the fewest sequences possible, and a few (Johnson et al., "Worst-case performance bounds for simple
one-dimensional packing algorithms", SIAM J. Comput. 3(4), 1974).
"""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


@attrs.define(frozen=True, eq=False)
class Packs:
    """Which conversations share a sequence."""

    members: Integers
    """Numbers of conversations, those of a sequence together, [conversations]."""
    firsts: Integers
    """Where each sequence's members begin, and the end, [sequences + 1]."""

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def of(self, number: int) -> Integers:
        """Return the conversations of a sequence."""
        return self.members[self.firsts[number] : self.firsts[number + 1]]


def alone(numbers: Integers) -> Packs:
    """Give each conversation a sequence of its own."""
    return Packs(numbers, np.arange(len(numbers) + 1))


def best_fit(numbers: Integers, sizes: Integers, length: int) -> Packs:
    """Pack conversations; which share a sequence depends on nothing else than this.

    Args:
        numbers: of the conversations, [n].
        sizes: positions that each takes, [n]: 1 up to ``length``.
        length: of a sequence.
    """
    order = np.argsort(-sizes, kind="stable")
    sequence_of = np.empty(len(numbers), np.int64)
    with_space: list[list[int]] = [[] for _ in range(length + 1)]  # sequences by the positions left
    any_with = 0  # a bit for each number of positions left that some sequence has
    count = 0
    for place, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        fitting = any_with >> size
        if fitting:
            space = size + (fitting & -fitting).bit_length() - 1
            sequence = with_space[space].pop()
            if not with_space[space]:
                any_with ^= 1 << space
        else:
            space, sequence = length, count
            count += 1
        sequence_of[place] = sequence
        if left := space - size:
            with_space[left].append(sequence)
            any_with |= 1 << left
    together = np.argsort(sequence_of, kind="stable")
    sizes_of = np.bincount(sequence_of, minlength=count)
    return Packs(numbers[together], np.concatenate([[0], np.cumsum(sizes_of)]).astype(np.int64))
