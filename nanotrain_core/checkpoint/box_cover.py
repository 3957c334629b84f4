"""Checks that boxes make up a tensor: each element in exactly one of them. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from nanotrain_core.checkpoint.tensor_boxes import Box, Shape


def coverage_problem(shape: Shape, boxes: Sequence[Box]) -> str:
    """Return why ``boxes`` do not make up a tensor of ``shape``: empty if each element is in exactly one."""
    if not boxes:
        return "no block of it exists"
    for offset, size in boxes:
        if len(offset) != len(shape) or len(size) != len(shape):
            return f"a block at {offset} of shape {size} does not belong to {shape}"
        if any(o < 0 or n < 0 or o + n > whole for o, n, whole in zip(offset, size, shape, strict=True)):
            return f"the block at {offset} of shape {size} is outside of {shape}"
    held = sum(prod(size) for _, size in boxes)
    if held != prod(shape):
        return f"its blocks hold {held} numbers, but {shape} has {prod(shape)}"
    twice = overlap(boxes)
    return f"blocks at {twice[0]} and {twice[1]} overlap" if twice else ""


def overlap(boxes: Sequence[Box]) -> tuple[Shape, Shape] | None:
    """Return the offsets of two boxes that share an element, None if no two do.

    A sweep along the axis that separates most boxes: only boxes that overlap along it are compared.
    """
    full = [box for box in boxes if prod(box[1])]
    if len(full) < 2:
        return None
    axes = range(len(full[0][0]))
    axis = max(axes, key=lambda a: len({offset[a] for offset, _ in full}), default=None)
    if axis is None:  # two scalars
        return full[0][0], full[1][0]
    reaching: list[Box] = []
    for offset, size in sorted(full, key=lambda box: box[0][axis]):
        reaching = [(o, n) for o, n in reaching if o[axis] + n[axis] > offset[axis]]
        for other, length in reaching:
            if all(offset[a] < other[a] + length[a] and other[a] < offset[a] + size[a] for a in axes):
                return other, offset
        reaching.append((offset, size))
    return None
