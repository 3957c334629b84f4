"""Which rank writes which blocks of a checkpoint: agreed once, as long as all ranks hold the same."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from nanotrain_core.api import CheckpointError
from nanotrain_core.api.torch import Block, Mesh
from nanotrain_sharded_ckpt_v2 import blocks
from nanotrain_sharded_ckpt_v2.flags import LateFlag
from nanotrain_sharded_ckpt_v2.object_collectives import agree, gather_to_first, scatter_from_first
from nanotrain_sharded_ckpt_v2.save_plan import BlockMetadata, Tensor, make_plan


@attrs.define(frozen=True)
class ShardAssignment:
    """Which rank writes what, for blocks with these names and shapes."""

    metadata: Sequence[BlockMetadata]
    """Of this rank's blocks."""
    mine: Sequence[int]
    """The indices of those that this rank writes, but for frozen ones."""
    frozen: Sequence[int]
    """The indices of frozen ones that it writes, or links."""
    tensors: dict[str, Tensor]
    """Of all ranks; on rank 0 only."""


class ShardAssigner:
    """Makes a :class:`ShardAssignment` for the blocks of each save."""

    def __init__(self, mesh: Mesh, *, link_frozen: bool) -> None:
        """``link_frozen``: whether frozen blocks get files of their own."""
        self.mesh, self.link_frozen = mesh, link_frozen
        self._assigned: ShardAssignment | None = None
        self._changed = LateFlag(mesh, late=False)  # a save waits for its answer

    @property
    def assigned(self) -> ShardAssignment:
        """The assignment of the last save."""
        assert self._assigned is not None
        return self._assigned

    def assign(self, wanted: Sequence[Block]) -> ShardAssignment:
        """Gather and scatter: assign the boxes, unless all ranks hold the same as the last time.

        Raises:
            CheckpointError: on all ranks: one cannot be saved, or they leave a gap or overlap.
        """
        problem, metadata = "", []
        try:
            metadata = [blocks.metadata_of(block, linked=self.link_frozen) for block in wanted]
        except CheckpointError as error:
            problem = str(error)
        agree(problem, self.mesh)
        if self._assigned is not None and not self._changed.any(metadata != self._assigned.metadata):
            return self._assigned
        self._assigned = None
        everyone = gather_to_first(metadata, self.mesh)
        shares: list[tuple[Sequence[int], Sequence[int]]] = []
        tensors: dict[str, Tensor] = {}
        if everyone:
            try:
                plan = make_plan(everyone)
                shares, tensors = list(zip(plan.mine, plan.frozen, strict=True)), dict(plan.tensors)
            except CheckpointError as error:
                problem = str(error)
        agree(problem, self.mesh)
        mine, frozen = scatter_from_first(shares, self.mesh)
        self._assigned = ShardAssignment(metadata, mine, frozen, tensors)
        return self._assigned
