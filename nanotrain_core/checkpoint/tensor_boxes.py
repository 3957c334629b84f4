"""Ranges of flattened tensors as boxes: what a flat optimizer shard is, seen from the tensor."""

from __future__ import annotations

from math import prod

#: Sizes of a tensor, or where a box begins in it.
Shape = tuple[int, ...]
#: Where a box begins in its tensor, and its shape.
Box = tuple[Shape, Shape]


def boxes(shape: Shape, start: int, stop: int) -> list[Box]:
    """Cut elements ``start`` to ``stop`` of a tensor, flattened row by row, into boxes, in their order.

    At most 2n - 1 boxes in n dimensions: the end of a row, whole rows, the beginning of a row.

    >>> boxes((4, 10), 7, 32)
    [((0, 7), (1, 3)), ((1, 0), (2, 10)), ((3, 0), (1, 2))]
    """
    if not shape:
        return [((), ())] if start < stop else []
    inner = shape[1:]
    row = prod(inner)
    found: list[Box] = []
    while start < stop:
        index, inside = divmod(start, row)
        rows = 0 if inside else (stop - start) // row
        if rows:
            found.append(((index, *(0 for _ in inner)), (rows, *inner)))
            start += rows * row
            continue
        end = min(stop, (index + 1) * row)
        pieces = boxes(inner, inside, end - index * row)
        found += [((index, *offset), (1, *extent)) for offset, extent in pieces]
        start = end
    return found
