"""MXFP8: E4M3 in blocks of 32 with power-of-two scales of eight bits (E8M0), and its exact emulation.

Blocks lie along the dimension that a product sums over, and every operand is rounded from itself, so a
weight, an input and a gradient are each rounded in two ways::

                 left, in blocks of      right, in blocks of
    y            x       1 x 32          W   1 x 32
    dx           dy      1 x 32          W  32 x 1
    dW           dy     32 x 1           x  32 x 1

Of x only the form for dW is saved: a byte for each number, and one for each 32. Scales are powers of two, so
that a code times its scale is exact in float32, and so is a product of two.

Shapes: M rows, K inputs, N outputs; for stacked weights E; m blocks along M.

Sources: OCP Microscaling Formats (MX) v1.0; Rouhani et al., arXiv 2310.10537; Mishra et al., arXiv 2506.08027
(E4M3 for gradients too, and scales rounded up).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import attrs
import torch
import torch.nn.functional as F

from nanotrain_core.api.torch import SavedTensors
from nanotrain_fp8_deepseek_v3 import units
from nanotrain_fp8_deepseek_v3.formats import E4M3, Rounding, Tiled, dequantize_columns, quantize
from nanotrain_fp8_deepseek_v3.gemm import EmulatedFP8, FP8Recipe
from nanotrain_fp8_deepseek_v3.operand_cache import OperandCache
from nanotrain_fp8_deepseek_v3.recipe import DY, DY_OF_DW, W_OF_DX, X_OF_DW, W, X

#: Elements that share a scale.
BLOCK = 32


@attrs.define(frozen=True)
class MXRecipe(FP8Recipe):
    """Blocks of MX; every operand is rounded from itself, along what is summed over."""

    COMPARED = True

    tile: int = BLOCK
    rounding: Rounding = "ceil"
    """How scales are rounded."""

    @property
    def units(self) -> units.Units:
        """Those of MX."""
        return units.MX

    @property
    def key(self) -> str:
        """``mx ceil``."""
        return f"mx {self.rounding}"

    @classmethod
    def of_key(cls, key: str) -> Self:
        """Return the recipe of a key."""
        return cls(rounding="floor" if key == "mx floor" else "ceil")

    @property
    def operands(self) -> tuple[str, ...]:
        """The rounded operands, one for each rounding."""
        return X, W, DY, W_OF_DX, X_OF_DW, DY_OF_DW

    def round(self, operand: str, x: torch.Tensor) -> tuple[torch.Tensor, Tiled]:
        """Return an operand and its blocks."""
        tile = self.along_row if operand in (X, W, DY) else self.along_column
        return x, quantize(x, tile, e8m0=self.rounding)

    def emulated(self, cache: OperandCache | None = None) -> EmulatedMX:
        """Return the emulation, which is the reference, outside graphs."""
        return EmulatedMX(self, cache)


def e8m0(scales: torch.Tensor) -> torch.Tensor:
    """Return powers of two as E8M0, one byte each; infinity and NaN are its NaN."""
    return scales.to(torch.float8_e8m0fnu).view(torch.uint8)


def blocks_of(M: int, experts: int | None) -> int:
    """Return the rows of saved scales: none but a last block is shorter; of ``experts``, one of each is."""
    return -(-M // BLOCK) if experts is None else M // BLOCK + experts


class EmulatedMX(EmulatedFP8):
    """Operands rounded to MXFP8, multiplied in full precision."""

    recipe: MXRecipe

    def rounded(self, x_RC: torch.Tensor, tile: tuple[int, int]) -> Tiled:
        """Return the blocks of an operand."""
        return quantize(x_RC, tile, e8m0=self.recipe.rounding)

    def of_weight(self, weight_NK: torch.Tensor) -> SavedTensors:
        """Return the weight rounded along its inputs, for y, and along its outputs, for dx."""
        weight = weight_NK.detach()
        return tuple(self.rounded(weight, tile).values() for tile in (self.along_row, self.along_column))

    @property
    def rounded_together(self) -> list[int] | None:
        """Each weight's rows."""
        return self.groups

    def round_input(self, x_MK: torch.Tensor) -> tuple[torch.Tensor, SavedTensors]:
        """Return what :meth:`of_input` returns, without its cache."""
        values = self.rounded(x_MK, self.along_row).values()
        codes, scales = zip(*map(self.keep_gradient, self._split(x_MK)), strict=True)
        scales_mK, experts = torch.cat(scales), None if self.groups is None else len(self.groups)
        missing = blocks_of(len(x_MK), experts) - len(scales_mK)  # a graph does not know what a group lacks
        return values, (torch.cat(codes), F.pad(scales_mK, (0, 0, 0, missing)))

    def kept_like(self, x_MK: torch.Tensor, experts: int | None) -> SavedTensors:
        """Return codes [M, K] and scales [m, K]."""
        M, K = x_MK.shape
        scales = x_MK.new_empty(blocks_of(M, experts), K, dtype=torch.uint8)
        return x_MK.new_empty(M, K, dtype=E4M3.dtype), scales

    def split_kept(self, kept: SavedTensors) -> Iterator[SavedTensors]:
        """Return what was saved of each weight's rows."""
        codes, scales_mK = self._split(kept[0]), kept[1]
        blocks = [blocks_of(len(rows), None) for rows in codes]
        return zip(codes, torch.split(scales_mK[: sum(blocks)], blocks), strict=True)

    def of_kept(self, kept: SavedTensors) -> torch.Tensor:
        """Return the x of one weight."""
        return self.of_kept_gradient(kept)

    def of_gradient(self, d_y_MN: torch.Tensor, *, for_weight: bool) -> torch.Tensor:
        """Return dy rounded along its rows, or along the columns of one weight's rows."""
        return self.rounded(d_y_MN, self.along_column if for_weight else self.along_row).values()

    def keep_gradient(self, d_y_MN: torch.Tensor) -> SavedTensors:
        """Return codes [M, N] and scales [m, N] along the columns of one weight's rows."""
        blocks = self.rounded(d_y_MN, self.along_column)
        return blocks.codes(), e8m0(blocks.scales.squeeze((-3, -1)))

    def of_kept_gradient(self, kept: SavedTensors) -> torch.Tensor:
        """Return the values of :meth:`keep_gradient`."""
        codes_MN, scales = kept
        return dequantize_columns(codes_MN, scales.view(torch.float8_e8m0fnu).float(), E4M3, BLOCK)

    def _split(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.split(rows, self.groups or [len(rows)])
