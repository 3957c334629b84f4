"""Ranges of flattened tensors as boxes of the tensor, such as those of a flat optimizer shard."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

#: Shape of a tensor, or the offset of a box in it.
Shape = tuple[int, ...]
#: The offset of a box in its tensor, and its shape.
Box = tuple[Shape, Shape]


def box_slices(offset: Iterable[int], shape: Iterable[int]) -> tuple[slice, ...]:
    """Return a box as an index into its tensor.

    >>> box_slices((1, 0), (2, 10))
    (slice(1, 3, None), slice(0, 10, None))
    """
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def boxes(shape: Shape, start: int, stop: int) -> list[Box]:
    """Split elements ``start`` to ``stop`` of a tensor, flattened in row-major order, into ordered boxes.

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


def boxes_at(at: Shape, shape: Shape, start: int, stop: int) -> list[Box]:
    """Return :func:`boxes` of a block that begins ``at`` this offset, as boxes of the whole tensor."""
    return [(tuple(a + b for a, b in zip(at, o, strict=True)), n) for o, n in boxes(shape, start, stop)]
