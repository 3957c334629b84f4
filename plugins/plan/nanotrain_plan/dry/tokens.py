"""How many tokens the experts of each rank are called with, where ranks cannot split a batch evenly."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from nanotrain_core.api import Recipe, Role, shared_tokens, tagged
from nanotrain_core.api.torch import Batch, Run, Shard, shard_range


class TokensOfRanks:
    """Tokens by rank, of each microbatch: sequences are split over ranks, then the tokens of each."""

    def __init__(self, run: Run, microbatches: int) -> None:
        recipe: Recipe = run.recipe
        self.layout, self.batch, self.microbatches = run.mesh.layout, recipe.batch, microbatches
        modules = (each for part in run.stages.values() for each in tagged(part))
        among = {
            dim for _, module, tag in modules if tag.role is Role.EXPERTS for dim in shared_tokens(module)
        }
        dense = self.layout.views["dense"].dims
        self.sharing = tuple(dim for dim in dense if dim in among)
        """Dimensions along which wrappers give each rank a share of the tokens."""
        self._sizes = cache(self._sizes_of)

    @property
    def even(self) -> bool:
        """Whether all ranks have as many."""
        rows, layout = self.layout.size(*self.layout.row_dims), self.layout
        parts = layout.size(*layout.sequence_dims) * layout.size(*self.sharing)
        return self.batch.sequences % rows == 0 and self.batch.length % parts == 0

    def of(self, microbatch: int, rank: int) -> int:
        """Return the tokens of a microbatch with which experts are called on ``rank``."""
        layout, length = self.layout, self.batch.length
        shard = Shard(layout.coordinate(rank, *layout.row_dims), layout.size(*layout.row_dims))
        for dims in (layout.sequence_dims, self.sharing):
            first, end = shard_range(length, layout.coordinate(rank, *dims), layout.size(*dims))
            length = end - first
        return self._sizes(len(shard.rows(self.batch.sequences)))[microbatch] * length

    def _sizes_of(self, rows: int) -> Sequence[int]:
        """Return the sequences of each microbatch of a rank with so many."""
        whole = Batch(torch.empty(rows, 0, dtype=torch.int64, device="meta"))
        return [each.sequences for each in whole.split(self.batch.microbatch, self.microbatches)]
