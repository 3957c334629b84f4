"""The three GEMMs in NVFP4, and their exact emulation.

Each operand is rounded from itself, along what a product sums over; H: transformed (see
:mod:`~nanotrain_fp8_deepseek_v3.nvfp4.hadamard`), SR: rounded stochastically (see
:mod:`~nanotrain_fp8_deepseek_v3.nvfp4.rounding`), the others to nearest::

                 left, in blocks of         right, in blocks of
    y            x        1 x 16            W  16 x 16
    dx           dy       1 x 16  SR        W  16 x 16, the same
    dW           dy      16 x 1   H, SR     x  16 x 1   H

With ``weight_blocks = "1x16"`` the weight has blocks of 1 x 16 for y and of 16 x 1 for dx. No block spans the
rows of two experts: the last rows of each are filled up with zeros to sixteen. Of x only the form for dW is
saved, two codes a byte: 0.5625 bytes for each number. The rows of each expert, and each expert's weight, have
a tensor scale.

Shapes: M rows, K inputs, N outputs; for stacked weights E; m blocks along M.

Source: NVIDIA, arXiv 2509.25149, section 4 and appendix C.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Self

import attrs
import torch
import torch.nn.functional as F

from nanotrain_core.api.torch import SavedTensors
from nanotrain_fp8_deepseek_v3 import units
from nanotrain_fp8_deepseek_v3.gemm import Emulation
from nanotrain_fp8_deepseek_v3.nvfp4.format import BLOCK, Blocks, TensorScale, pack, quantize, unpack
from nanotrain_fp8_deepseek_v3.operand_cache import OperandCache
from nanotrain_fp8_deepseek_v3.recipe import DY, DY_OF_DW, W_OF_DX, X_OF_DW, Recipe, W, X

ROW, COLUMN, SQUARE = (1, BLOCK), (BLOCK, 1), (BLOCK, BLOCK)


@attrs.define(frozen=True)
class NVFP4Recipe(Recipe):
    """How operands are rounded to NVFP4."""

    tensor_scale: TensorScale = "power_of_two"
    weight_blocks: Literal["16x16", "1x16"] = "16x16"
    hadamard: bool = True
    """Transform the operands of dW."""
    stochastic_rounding: bool = True
    """Round dy stochastically."""

    @property
    def units(self) -> units.Units:
        """Those of NVFP4."""
        return units.NVFP4

    @property
    def key(self) -> str:
        """``nvfp4 power_of_two 16x16 1 1``."""
        flags = f"{int(self.hadamard)} {int(self.stochastic_rounding)}"
        return f"nvfp4 {self.tensor_scale} {self.weight_blocks} {flags}"

    @classmethod
    def of_key(cls, key: str) -> Self:
        """Return the recipe of a key."""
        _, scale, blocks, hadamard, stochastic = key.split()
        return cls(
            "float32" if scale == "float32" else "power_of_two",
            "1x16" if blocks == "1x16" else "16x16",
            hadamard == "1",
            stochastic == "1",
        )

    @property
    def operands(self) -> tuple[str, ...]:
        """The rounded operands, one for each rounding."""
        of_dx = (W_OF_DX,) if self.weight_blocks == "1x16" else ()
        return (X, W, DY, *of_dx, X_OF_DW, DY_OF_DW)

    def tile_of(self, operand: str) -> tuple[int, int]:
        """Return rows and columns of a block, where the operand lies as it does in a layer."""
        if operand in (W, W_OF_DX) and self.weight_blocks == "16x16":
            return SQUARE
        return ROW if operand in (X, W, DY) else COLUMN

    def blocks(self, operand: str, x: torch.Tensor, tile: tuple[int, int] | None = None) -> Blocks:
        """Return the blocks of an operand of one weight, padded to whole ones; ``tile``: if it is turned."""
        return quantize(
            x,
            tile or self.tile_of(operand),
            tensor_scale=self.tensor_scale,
            hadamard=self.hadamard and operand in (X_OF_DW, DY_OF_DW),
            stochastically=self.stochastic_rounding and operand in (DY, DY_OF_DW),
        )

    def round(self, operand: str, x: torch.Tensor) -> tuple[torch.Tensor, Blocks]:
        """Return an operand as it is rounded, transformed for dW and filled up with zeros, and its blocks."""
        blocks = self.blocks(operand, x)
        return blocks.whole(), blocks

    def emulated(self, cache: OperandCache | None = None) -> EmulatedNVFP4:
        """Return the emulation, which is the reference, outside graphs."""
        return EmulatedNVFP4(self, cache)


def blocks_of(M: int, experts: int | None) -> int:
    """Return how many blocks along M are saved: a last one, of each of ``experts``, may have zeros."""
    return -(-M // BLOCK) if experts is None else M // BLOCK + experts


class EmulatedNVFP4(Emulation):
    """Operands rounded to NVFP4, multiplied in full precision."""

    recipe: NVFP4Recipe

    def __init__(self, recipe: NVFP4Recipe, cache: OperandCache | None = None) -> None:
        super().__init__(cache)
        self.recipe = recipe

    def of_weight(self, weight_NK: torch.Tensor) -> SavedTensors:
        """Return the weight for y, and for dx if that is another."""
        weight = weight_NK.detach()
        return tuple(
            cropped(self.recipe.blocks(operand, weight).values(), weight)
            for operand in self.recipe.operands
            if operand in (W, W_OF_DX)
        )

    def round_input(self, x_MK: torch.Tensor) -> tuple[torch.Tensor, SavedTensors]:
        """Return x rounded along its rows, and what is saved: see :meth:`kept_like`."""
        pieces = [self._packed(X_OF_DW, x) for x in self._split(x_MK)]
        codes, scales, of_tensors = zip(*pieces, strict=True)
        experts = None if self.groups is None else len(self.groups)
        missing = blocks_of(len(x_MK), experts) - sum(map(len, scales))  # a graph does not know it
        filled = F.pad(torch.cat(scales).view(torch.uint8), (0, 0, 0, missing)).view(scales[0].dtype)
        packed = F.pad(torch.cat(codes), (0, 0, 0, missing * BLOCK // 2))
        return self._along_rows(X, x_MK), (packed, filled, torch.stack(of_tensors))

    def kept_like(self, x_MK: torch.Tensor, experts: int | None) -> SavedTensors:
        """Return packed codes [8 m, K], scales [m, K] in E4M3, and the tensor scale of each weight's rows."""
        (M, K), E = x_MK.shape, 1 if experts is None else experts
        m = blocks_of(M, experts)
        return (
            x_MK.new_empty(m * BLOCK // 2, K, dtype=torch.uint8),
            x_MK.new_empty(m, K, dtype=torch.float8_e4m3fn),
            x_MK.new_empty(E, dtype=torch.float32),
        )

    def split_kept(self, kept: SavedTensors) -> Iterator[SavedTensors]:
        """Return what was saved of each weight's rows."""
        packed, scales, of_tensors = kept
        blocks = [len(scales)] if self.groups is None else [blocks_of(rows, None) for rows in self.groups]
        total = sum(blocks)
        return zip(
            torch.split(packed[: total * BLOCK // 2], [count * BLOCK // 2 for count in blocks]),
            torch.split(scales[:total], blocks),
            of_tensors.unbind(),
            strict=True,
        )

    def of_kept(self, kept: SavedTensors) -> torch.Tensor:
        """Return the x of one weight, filled up to whole blocks."""
        return self.of_kept_gradient(kept)

    def rows_of_wgrad(self, M: int, experts: int | None) -> int:
        """Return the rows of :meth:`joined`, all in whole blocks."""
        return blocks_of(M, experts) * BLOCK

    def joined(self, pieces: Sequence[torch.Tensor], M: int) -> torch.Tensor:
        """Return x of all weights, and zeros in what a graph does not know to be unused."""
        rows = torch.cat(list(pieces))
        experts = None if self.groups is None else len(self.groups)
        return F.pad(rows, (0, 0, 0, self.rows_of_wgrad(M, experts) - len(rows)))

    def separated(self, x: torch.Tensor, M: int) -> Sequence[torch.Tensor]:
        """Undo :meth:`joined`."""
        rows = [blocks_of(own, None) * BLOCK for own in self.groups or [M]]
        return torch.split(x[: sum(rows)], rows)

    def of_gradient(self, d_y_MN: torch.Tensor, *, for_weight: bool) -> torch.Tensor:
        """Return dy rounded along its rows, or along the columns of one weight's rows in whole blocks."""
        if for_weight:
            return self.recipe.blocks(DY_OF_DW, d_y_MN).values()
        return self._along_rows(DY, d_y_MN)

    def keep_gradient(self, d_y_MN: torch.Tensor) -> SavedTensors:
        """Return codes, scales and the tensor scale of one weight's rows of dy, along its columns."""
        return self._packed(DY_OF_DW, d_y_MN)

    def of_kept_gradient(self, kept: SavedTensors) -> torch.Tensor:
        """Return the values of :meth:`keep_gradient`."""
        packed, scales, of_tensor = kept
        return unpack(packed, -2) * scales.float().repeat_interleave(BLOCK, 0) * of_tensor

    def _packed(self, operand: str, rows: torch.Tensor) -> SavedTensors:
        """Return packed codes [8 m, C], scales [m, C] and the tensor scale [] of blocks along columns."""
        blocks = self.recipe.blocks(operand, rows)
        scales = blocks.scales.squeeze((-3, -1)).to(torch.float8_e4m3fn)
        return pack(blocks.codes(), -2), scales, blocks.tensor_scale.view(())

    def _along_rows(self, operand: str, rows: torch.Tensor) -> torch.Tensor:
        """Return all rows, those of each weight with a tensor scale."""
        made = [cropped(self.recipe.blocks(operand, own).values(), own) for own in self._split(rows)]
        return made[0] if len(made) == 1 else torch.cat(made)

    def _split(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.split(rows, self.groups or [len(rows)])


def cropped(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return values without what was filled up."""
    return values[..., : like.shape[-2], : like.shape[-1]].contiguous()
