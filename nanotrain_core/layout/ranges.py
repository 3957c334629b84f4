"""Where ranks cut what they share: elements of a parameter (ZeRO), a vocabulary, a sequence."""

#: Where ranks share a parameter out, ranges begin at multiples of this many elements of the flattened block,
#: so that what is kept for a few neighbouring weights at once, as a quantized format's scale, is on one rank.
RANGE = 64


def share_of(length: int, index: int, count: int) -> tuple[int, int]:
    """Return first and one past the last of the ``index``-th of ``count`` shares, alike but for one.

    >>> [share_of(7, index, 3) for index in range(3)]
    [(0, 2), (2, 4), (4, 7)]
    """
    return length * index // count, length * (index + 1) // count
