"""Splitting elements of a parameter (ZeRO), a vocabulary or a sequence among ranks."""

#: Where ranks shard a parameter, ranges begin at multiples of this many elements of the flattened block, so
#: that values shared by a few neighboring weights, such as a quantized format's scale, are on one rank.
RANGE = 64


def shard_range(length: int, index: int, count: int) -> tuple[int, int]:
    """Return first and one past the last of the ``index``-th of ``count`` shards, equal to within one.

    >>> [shard_range(7, index, 3) for index in range(3)]
    [(0, 2), (2, 4), (4, 7)]
    """
    return length * index // count, length * (index + 1) // count
