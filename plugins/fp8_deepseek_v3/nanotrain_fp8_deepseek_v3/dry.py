"""FP8 GEMMs on ``meta``, without values: the tensors that a GPU's backend allocates and saves, for a dry run.

Shapes: M rows, K inputs, N outputs; for stacked weights E; k tiles along K.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Self

import torch

from nanotrain_core.api.torch import Prepared, SavedTensors
from nanotrain_fp8_deepseek_v3.formats import E4M3, TILE
from nanotrain_fp8_deepseek_v3.gemm import FP8GEMM, FP8Recipe
from nanotrain_fp8_deepseek_v3.operand_cache import OperandCache
from nanotrain_fp8_deepseek_v3.recipe import LowBitGEMM, Recipe
from nanotrain_fp8_deepseek_v3.scaled import scaled_mm

Tensor = torch.Tensor


class Dry(LowBitGEMM):
    """Replaces the backend of the device in a plan: only shapes and bytes of products, of one weight or of
    stacked weights with equal numbers of rows each."""

    def __init__(
        self, recipe: Recipe, cache: OperandCache | None = None, counts_E: Tensor | None = None
    ) -> None:
        self.recipe, self.cache, self.counts_E = recipe, cache or OperandCache(), counts_E
        self.read_weight = self.cache.once(self.both_ways)

    def grouped(self, counts_E: Tensor) -> Self:
        """Return the same backend for stacked weights."""
        found = type(self)(self.recipe, self.cache, counts_E)
        found.read_weight = self.read_weight
        return found

    @staticmethod
    def both_ways(weight: Tensor) -> SavedTensors:
        """Return what is stored of a weight [(E,) N, K], and of its transpose."""
        raise NotImplementedError

    def prepare(self, weight: Tensor) -> SavedTensors:
        """Return :meth:`both_ways`, computed once for a step."""
        return self.read_weight(weight)

    def forms_of(self, weight: Tensor) -> SavedTensors:
        """Return :meth:`both_ways`, as prepared for this step."""
        return weight.forms if isinstance(weight, Prepared) else self.read_weight(weight)

    def blocks_along(self, M: int, block: int) -> int:
        """Return how many blocks M rows take, filled up to whole ones, of each expert."""
        experts = 1 if self.counts_E is None else min(len(self.counts_E), M)
        return (M + (block - 1) * experts) // block

    def of_each_weight(self, d_w: Tensor) -> Tensor:
        """Return one weight's gradient, or as many as there are stacked weights."""
        return d_w if self.counts_E is None else d_w.expand(len(self.counts_E), -1, -1).clone()


class DryFP8(FP8GEMM, Dry):
    """Codes in eight bits, of the weight and of its transpose."""

    scale_dtype: torch.dtype = torch.float32
    product_scale: torch.dtype = torch.float32
    """Dtype of a product's scales, which tells a planner what units it takes."""

    def __init__(
        self, recipe: FP8Recipe, cache: OperandCache | None = None, counts_E: Tensor | None = None
    ) -> None:
        Dry.__init__(self, recipe, cache, counts_E)
        self.tile = recipe.tile or TILE

    @staticmethod
    def both_ways(weight: Tensor) -> SavedTensors:
        """Return codes [(E,) N, K] and [(E,) K, N]."""
        codes = weight.detach().to(E4M3.dtype)
        return codes, codes.mT.contiguous()

    def save_for_wgrad(self, x_MK: Tensor) -> SavedTensors:
        """Return codes and scales of x, computed once for all layers that read it."""
        made: SavedTensors = self.cache.inputs.get(x_MK, "dry", lambda: self._coded(x_MK))
        return made

    def quantize(self, made_of_MK: Tensor) -> SavedTensors | None:
        """Return codes and scales, or None if the recipe does not request it."""
        return self._coded(made_of_MK) if self.recipe.quantize_swiglu else None

    def dequantize(self, kept: SavedTensors, dtype: torch.dtype) -> Tensor:
        """Return the dequantized values."""
        return kept[0].to(dtype)

    def forward(self, x_MK: Tensor, *weights: Tensor) -> tuple[list[Tensor], SavedTensors]:
        """Return x times each transposed weight, and codes and scales of x."""
        kept = self.save_for_wgrad(x_MK)
        left = self._left(x_MK, kept)
        return [self._times(left, self.forms_of(weight)[1], x_MK.dtype) for weight in weights], kept

    def _left(self, x_MK: Tensor, kept: SavedTensors) -> Tensor:
        """Return the codes of x for y: those that are saved."""
        return kept[0]

    def dgrad(self, d_y_MN: Tensor, weight: Tensor) -> Tensor:
        """Return dy times the weight."""
        return self._times(self._coded(d_y_MN)[0], self.forms_of(weight)[0], d_y_MN.dtype)

    def wgrad(self, d_y_MN: Tensor, kept: SavedTensors) -> Tensor:
        """Return the transposed dy times x, in float32, of each weight."""
        return self._of_coded(self._transposed(d_y_MN), kept)

    def defer_wgrad(self, d_y_MN: Tensor, kept: SavedTensors) -> Callable[[], Tensor]:
        """Return a function that computes wgrad later, from codes and scales of dy transposed."""
        return partial(self._of_coded, self._transposed(d_y_MN), kept)

    def _transposed(self, d_y_MN: Tensor) -> SavedTensors:
        """Return codes [N, P] and scales [N, P / tile]: P is M filled up to whole tiles, of each expert."""
        M, N = d_y_MN.shape
        tiles = self.blocks_along(M, self.tile)
        codes = d_y_MN.new_empty(N, tiles * self.tile, dtype=E4M3.dtype)
        return codes.copy_(d_y_MN.new_empty(()).expand_as(codes)), codes.new_empty(
            N, tiles, dtype=self.scale_dtype
        )

    def _of_coded(self, d_y: SavedTensors, kept: SavedTensors) -> Tensor:
        left, right = d_y[0][:, : len(kept[0])], kept[0].clone()
        return self.of_each_weight(self._product(left, right, torch.float32))

    def _times(self, rows_MK: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows [M, K] times [(E,) K, N]: each row uses one of the stacked matrices."""
        return self._product(rows_MK, right if right.dim() == 2 else right[0], dtype)

    def _product(self, left_MK: Tensor, right_KN: Tensor, dtype: torch.dtype) -> Tensor:
        """Return their product."""
        scale = left_MK.new_empty((), dtype=self.product_scale)
        made: Tensor = scaled_mm(left_MK, right_KN.T, scale, scale, "", "", dtype)
        return made

    def _coded(self, x_MK: Tensor) -> SavedTensors:
        """Return codes [M, K] and scales [M, k]."""
        k = -(-x_MK.shape[-1] // self.tile)
        return x_MK.to(E4M3.dtype), x_MK.new_empty((*x_MK.shape[:-1], k), dtype=self.scale_dtype)


class DryMX(DryFP8):
    """The same of MX, which saves x along its columns."""

    scale_dtype, product_scale = torch.uint8, torch.float8_e8m0fnu

    def _left(self, x_MK: Tensor, kept: SavedTensors) -> Tensor:
        """Return the codes of x along its rows."""
        return self._coded(x_MK)[0]
