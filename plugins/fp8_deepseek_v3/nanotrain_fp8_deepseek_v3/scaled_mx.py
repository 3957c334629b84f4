"""MXFP8 on Blackwell's tensor cores, through ``torch.nn.functional.scaled_mm``. **Not yet run on a GPU.**

Scales are E8M0 in the order that tensor cores read them (``SWIZZLE_32_4_4``): those of 128 rows and four
blocks lie together, as 32 rows of 16 bytes, each with the four scales of rows r, r + 32, r + 64 and r + 96.
What is missing of 128 rows and four blocks is filled up.

Shapes: M rows, K inputs, N outputs; for stacked weights E; R rows and C columns of anything, c blocks.

Source: NVIDIA, cuBLAS documentation, "1D Block Scaling Factors Layout".
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from nanotrain_core.api.torch import SavedTensors
from nanotrain_fp8_deepseek_v3.formats import E4M3, Format, quantize
from nanotrain_fp8_deepseek_v3.gemm import FP8Recipe
from nanotrain_fp8_deepseek_v3.mx import BLOCK, e8m0
from nanotrain_fp8_deepseek_v3.operand_cache import OperandCache
from nanotrain_fp8_deepseek_v3.scaled import MX, Coded, ScaledFP8, aligned, multiply


class ScaledMX(ScaledFP8):
    """See :class:`~nanotrain_core.precision.gemm.GEMMBackend`. Experts are multiplied one after the other."""

    def __init__(self, recipe: FP8Recipe, cache: OperandCache | None = None) -> None:
        super().__init__(recipe, cache)
        self.of_weights = MX

    def _along_rows(self, x_RC: torch.Tensor, format_: Format = E4M3, *, power_of_two: bool = False) -> Coded:
        filled = F.pad(aligned(x_RC), (0, -x_RC.shape[1] % BLOCK))
        blocks = quantize(filled, (1, BLOCK), format_, e8m0=self.recipe.mx)
        return Coded(blocks.codes(), swizzled(e8m0(blocks.scales.flatten(1))), MX)

    def _block(self, w_RC: torch.Tensor) -> Coded:
        return self._along_rows(w_RC)

    def forward(self, x_MK: torch.Tensor, *weights: torch.Tensor) -> tuple[list[torch.Tensor], SavedTensors]:
        """Return x times each transposed weight, and codes and scales of x transposed, group by group."""
        return super().forward(x_MK, *weights)[0], self.save_for_wgrad(x_MK)

    def save_for_wgrad(self, x_MK: torch.Tensor) -> SavedTensors:
        """Return codes [K, M] and scales of x transposed, group by group."""
        if self.groups is not None:
            return tuple(each for x in self._split(x_MK) for each in self._transposed(x))
        made: SavedTensors = self.cache.transposed.get(x_MK, self.recipe, lambda: self._transposed(x_MK))
        return made

    def _transposed(self, x_MK: torch.Tensor) -> SavedTensors:
        coded = self._along_rows(x_MK.T)
        return coded.codes[: x_MK.shape[1]], coded.scales

    def _weight_gradients(self, gradients: Iterable[Coded], N: int, kept: SavedTensors) -> torch.Tensor:
        """Return dy, transposed, times what was kept of x: blocks lie along M."""
        pieces = zip(gradients, kept[::2], kept[1::2], strict=True)
        found = [
            multiply(d_y, Coded(aligned(codes_KM), scales, MX), (N, len(codes_KM)), torch.float32)
            if codes_KM.shape[1]
            else codes_KM.new_zeros(N, len(codes_KM), dtype=torch.float32)
            for d_y, codes_KM, scales in pieces
        ]
        return found[0] if self.groups is None else torch.stack(found)


def swizzled(scales_Rc: torch.Tensor) -> torch.Tensor:
    """Return scales in the order of tensor cores, filled up with zeros, which are scales of 2^-127."""
    R, c = scales_Rc.shape
    filled = F.pad(scales_Rc, (0, -c % 4, 0, -R % 128))
    return filled.view(-(-R // 128), 4, 32, -(-c // 4), 4).permute(0, 3, 2, 1, 4).flatten()
