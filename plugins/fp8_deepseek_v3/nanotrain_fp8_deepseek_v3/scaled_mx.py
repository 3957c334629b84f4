"""MXFP8 on Blackwell's tensor cores, through ``torch.nn.functional.scaled_mm``. **Not yet run on a GPU.**

Scales are E8M0 in the order that tensor cores read them (``SWIZZLE_32_4_4``): those of 128 rows and four
blocks lie together, as 32 rows of 16 bytes, each with the four scales of rows r, r + 32, r + 64 and r + 96.
What is missing of 128 rows and four blocks is filled up.

Shapes: M rows, K inputs, N outputs; for stacked weights E; R rows and C columns of anything, c blocks.

Source: NVIDIA, cuBLAS documentation, "1D Block Scaling Factors Layout".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanotrain_core.api.torch import SavedTensors
from nanotrain_fp8_deepseek_v3.formats import E4M3, quantize
from nanotrain_fp8_deepseek_v3.gemm import FP8GEMM
from nanotrain_fp8_deepseek_v3.mx import BLOCK, MXRecipe, e8m0
from nanotrain_fp8_deepseek_v3.operand_cache import OperandCache
from nanotrain_fp8_deepseek_v3.scaled import MX, Coded, ScaledBlocks, aligned


class ScaledMX(FP8GEMM, ScaledBlocks):
    """Blocks of MX."""

    recipe: MXRecipe

    def __init__(self, recipe: MXRecipe, cache: OperandCache | None = None) -> None:
        ScaledBlocks.__init__(self, recipe, cache)

    def _of_input(self, x_RC: torch.Tensor) -> Coded:
        filled = F.pad(aligned(x_RC), (0, -x_RC.shape[1] % BLOCK))
        blocks = quantize(filled, (1, BLOCK), E4M3, e8m0=self.recipe.rounding)
        return Coded(blocks.codes(), swizzled(e8m0(blocks.scales.flatten(1))), MX)

    def _of_gradient(self, d_y_RC: torch.Tensor) -> Coded:
        return self._of_input(d_y_RC)

    def _of_one_weight(self, w_NK: torch.Tensor) -> tuple[Coded, Coded]:
        return self._of_input(w_NK), self._of_input(w_NK.T)

    def _coded(self, tensors: SavedTensors) -> Coded:
        codes, scales = tensors
        return Coded(codes, scales, MX)


def swizzled(scales_Rc: torch.Tensor) -> torch.Tensor:
    """Return scales in the order of tensor cores, filled up with zeros, which are scales of 2^-127."""
    R, c = scales_Rc.shape
    filled = F.pad(scales_Rc, (0, -c % 4, 0, -R % 128))
    return filled.view(-(-R // 128), 4, 32, -(-c // 4), 4).permute(0, 3, 2, 1, 4).flatten()
