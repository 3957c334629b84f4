"""Assigns each box to one writer: the least loaded of the ranks that hold it. Torch-free.

torch's ``DefaultSavePlanner`` assigns them similarly, but its plans are expensive in a large run: 820,000
boxes of 2048 ranks took 19 s to unpickle and 11 s to plan, where 690,000 as plain tuples take 1.5 s and 9 s,
including the check that every tensor is complete. torch's own check omits that for a single rank, and never
checks whether ranks agree on a dtype. Reading, where boxes intersect other boxes, uses torch's planner: see
:mod:`~nanotrain_sharded_ckpt_v2.resharding`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod

import attrs

from nanotrain_core.api import DTYPE_BYTES, CheckpointError, Shape, coverage_problem

#: Name, dtype code, shape of the global tensor, offset, shape, whether frozen: a block without its values.
BlockMetadata = tuple[str, str, Shape, Shape, Shape, bool]


@attrs.define(frozen=True)
class Tensor:
    """One tensor of the run, and the location of its boxes."""

    dtype: str
    """Its safetensors code."""
    shape: Shape
    chunks: Sequence[tuple[int, Shape, Shape]]
    """Shard number, offset, shape; in this order. A rank's number is that of its shard; the number of ranks
    is added for its frozen weights, which have a file of their own."""


@attrs.define(frozen=True)
class Plan:
    """The boxes that each rank writes."""

    mine: Sequence[Sequence[int]]
    """For each rank the indices in its list of blocks of those that it writes, but for frozen ones."""
    frozen: Sequence[Sequence[int]]
    """The indices of frozen ones, likewise."""
    tensors: Mapping[str, Tensor]
    """By name, sorted."""


def make_plan(metadata: Sequence[Sequence[BlockMetadata]]) -> Plan:
    """Assign the boxes of all ranks to writers among those that hold them.

    ``metadata``: for each rank that of its blocks.

    Raises:
        CheckpointError: ranks disagree about a tensor, or its boxes leave a gap or overlap.
    """
    holders: dict[tuple[str, Shape, Shape], list[tuple[int, int]]] = {}
    changing: set[str] = set()
    forms: dict[str, tuple[str, Shape, int]] = {}
    for rank, held in enumerate(metadata):
        for position, (name, dtype, whole, offset, shape, frozen) in enumerate(held):
            known = forms.setdefault(name, (dtype, whole, rank))
            if known[:2] != (dtype, whole):
                raise CheckpointError(
                    f"{name} is {dtype} {whole} on rank {rank} and {known[0]} {known[1]} on rank {known[2]}"
                )
            holders.setdefault((name, offset, shape), []).append((rank, position))
            if not frozen:
                changing.add(name)  # even if it is frozen on another rank
    shares = _assign(holders, forms, changing, len(metadata))
    positions, ranks = [sorted(positions) for positions, _ in shares], len(metadata)
    return Plan(positions[:ranks], positions[ranks:], _tensors(shares, forms))


_Assigned = tuple[list[int], list[tuple[str, Shape, Shape]]]


def _assign(
    holders: Mapping[tuple[str, Shape, Shape], list[tuple[int, int]]],
    forms: Mapping[str, tuple[str, Shape, int]],
    changing: Collection[str],
    ranks: int,
) -> list[_Assigned]:
    """Assign boxes held by one rank to it, then the others, largest first, to the least loaded holder.

    Frozen ones are assigned as evenly, but apart: the second half of what is returned, a share of each rank.
    """
    load = [0] * 2 * ranks
    shares: list[_Assigned] = [([], []) for _ in load]
    sizes = {box: DTYPE_BYTES[forms[box[0]][0]] * prod(box[2]) for box in holders}
    for box, choices in sorted(
        holders.items(), key=lambda item: (len(item[1]) > 1, -sizes[item[0]], item[0])
    ):
        first = 0 if box[0] in changing else ranks
        rank, position = min(choices, key=lambda choice: (load[first + choice[0]], choice[0]))
        load[first + rank] += sizes[box]
        shares[first + rank][0].append(position)
        shares[first + rank][1].append(box)
    return shares


def _tensors(shares: Sequence[_Assigned], forms: Mapping[str, tuple[str, Shape, int]]) -> dict[str, Tensor]:
    chunks: dict[str, list[tuple[int, Shape, Shape]]] = {name: [] for name in sorted(forms)}
    for number, (_, boxes) in enumerate(shares):
        for name, offset, shape in boxes:
            chunks[name].append((number, offset, shape))
    found = {}
    for name, parts in chunks.items():
        dtype, shape, _ = forms[name]
        problem = coverage_problem(shape, [(offset, size) for _, offset, size in parts])
        if problem:
            raise CheckpointError(f"the blocks of {name} are not the whole tensor: {problem}")
        found[name] = Tensor(dtype, shape, sorted(parts, key=lambda part: part[1]))
    return found
