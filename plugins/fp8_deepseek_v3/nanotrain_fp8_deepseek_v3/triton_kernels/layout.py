"""Memory layout of rows: their padding, and which rows belong to which of several stacked weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanotrain_fp8_deepseek_v3.formats import TILE
from nanotrain_fp8_deepseek_v3.scaled import ALIGNED


def filled(rows: int) -> int:
    """Return the padded row count of an operand: rows, and columns of scales, begin at 16 bytes."""
    return -(-rows // ALIGNED) * ALIGNED


@dataclass(frozen=True, eq=False)
class Groups:
    """The rows of each of E stacked weights. It is on the device: the host never waits for it.

    Tiles of 128 rows begin anew in each group, so that no tile spans two.
    """

    rows: torch.Tensor
    """[E + 1], int64: the offset of each group, and the end."""
    tiles: torch.Tensor
    """[E + 1], int64: the index of its first tile, and the number of tiles."""

    @classmethod
    def of(cls, counts_E: torch.Tensor, device: torch.device) -> Groups:
        """Return groups with the given row counts."""
        counts_2E = torch.stack((counts_E, (counts_E + (TILE - 1)) // TILE)).to(device, torch.int64)
        ends = torch.nn.functional.pad(counts_2E.cumsum(1), (1, 0))
        return cls(ends[0], ends[1])

    def __len__(self) -> int:
        return len(self.rows) - 1

    def most_tiles(self, rows: int) -> int:
        """Return the maximum number of tiles of this many rows, however they are split into groups."""
        return (rows + (TILE - 1) * min(len(self), rows)) // TILE

    @property
    def searched(self) -> int:
        """Return E, rounded up to a power of two."""
        return int(triton.next_power_of_2(len(self)))


@triton.jit  # type: ignore[untyped-decorator]
def group_of(tile, tiles_ptr, E, SEARCHED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the group of a tile; E for one beyond the last."""
    e = tl.arange(0, SEARCHED)
    ends = tl.load(tiles_ptr + 1 + e, mask=e < E, other=0x7FFFFFFF)
    return tl.sum((ends <= tile).to(tl.int32), 0)


@triton.jit  # type: ignore[untyped-decorator]
def rows_of(tile, e, tiles_ptr, rows_ptr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the rows [128] of a tile of group ``e``, int64, and where the group ends."""
    first = tl.load(rows_ptr + e) + (tile - tl.load(tiles_ptr + e)) * TILE
    return first + tl.arange(0, TILE), tl.load(rows_ptr + e + 1)
