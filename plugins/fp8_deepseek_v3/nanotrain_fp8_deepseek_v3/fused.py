"""GEMMs of operands rounded by Triton kernels, in one pass each.

One weight is multiplied by torch, as in :mod:`~nanotrain_fp8_deepseek_v3.scaled`; torch has no grouped
GEMM with these scales, so experts are multiplied by a kernel, all in one launch. Imported only if
Triton is installed.

Shapes: M rows, K inputs, N outputs; for stacked weights E.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from nanotrain_core.api.torch import Prepared, QuantizedInput, SavedTensors
from nanotrain_fp8_deepseek_v3.gemm import FP8GEMM, FP8Recipe
from nanotrain_fp8_deepseek_v3.operand_cache import MadeOnce, OperandCache
from nanotrain_fp8_deepseek_v3.scaled import Coded, multiply
from nanotrain_fp8_deepseek_v3.triton_kernels.experts import multiply_columns, multiply_rows
from nanotrain_fp8_deepseek_v3.triton_kernels.layout import Groups
from nanotrain_fp8_deepseek_v3.triton_kernels.quantize_blocks import Blocks, quantize_blocks
from nanotrain_fp8_deepseek_v3.triton_kernels.quantize_rows import quantize_rows
from nanotrain_fp8_deepseek_v3.triton_kernels.quantize_swiglu import (
    Backward,
    quantize_swiglu,
    requantize_swiglu,
)
from nanotrain_fp8_deepseek_v3.triton_kernels.quantize_transposed import (
    quantize_transposed,
    requantize_transposed,
)

Pair = tuple[torch.Tensor, torch.Tensor]


class Rounded(FP8GEMM):
    """Rounds operands, without multiplying. Codes and scales [R, C], [R, c], padded."""

    recipe: FP8Recipe
    cache: OperandCache
    read_weight: MadeOnce[Blocks]

    def grouped(self, counts_E: torch.Tensor) -> TritonExperts:
        """Return the backend for stacked weights. The host does not wait for the counts."""
        return TritonExperts(self, counts_E)

    def prepare(self, weight: torch.Tensor) -> SavedTensors:
        """Return codes and scales of a weight and of its transpose."""
        blocks = self.read_weight(weight)
        return blocks.codes_ENK, blocks.scales_Enk, blocks.codes_EKN, blocks.scales_Ekn

    def _blocks(self, weight: torch.Tensor) -> Blocks:
        return Blocks(*weight.forms) if isinstance(weight, Prepared) else self.read_weight(weight)

    def save_for_wgrad(self, x_MK: torch.Tensor) -> SavedTensors:
        """Return codes and scales of x."""
        return cropped(self._input(x_MK), x_MK)

    def quantize(self, made_of_MK: torch.Tensor) -> SavedTensors | None:
        """Return codes and scales, or None if the recipe does not request it."""
        return cropped(quantize_rows(made_of_MK), made_of_MK) if self.recipe.quantize_swiglu else None

    def swiglu(
        self, gate_MF: torch.Tensor, up_MF: torch.Tensor, *, whole: bool = False
    ) -> tuple[QuantizedInput, SavedTensors, SavedTensors] | None:
        """Return h = silu(gate) up, and gate and up, each rounded in the kernel that computes h."""
        recipe = self.recipe
        if not recipe.quantize_swiglu:
            return None
        made = quantize_swiglu(gate_MF, up_MF, power_of_two=recipe.input_power_of_two, whole=whole)
        h = QuantizedInput(made.h, gate_MF.shape, gate_MF.dtype, made.whole)
        return h, cropped(made.gate, gate_MF), cropped(made.up, up_MF)

    def recompute_swiglu(
        self, gate: SavedTensors, up: SavedTensors, dtype: torch.dtype, *, whole: bool = False
    ) -> QuantizedInput:
        """Return h, recomputed from codes and scales of gate and up, and rounded in the same kernel."""
        made = self._recompute_swiglu(gate, up, dtype, None, whole=whole)
        return QuantizedInput(made.h, gate[0].shape, dtype, made.whole)

    def swiglu_backward(
        self, gate: SavedTensors, up: SavedTensors, d_h_MF: torch.Tensor, *, whole: bool = False
    ) -> tuple[QuantizedInput, torch.Tensor, torch.Tensor]:
        """Return h as :meth:`recompute_swiglu` does, and the gradients of gate and up, by the same kernel."""
        made = self._recompute_swiglu(gate, up, d_h_MF.dtype, d_h_MF, whole=whole)
        assert made.d_gate is not None and made.d_up is not None  # noqa: PT018
        return QuantizedInput(made.h, d_h_MF.shape, d_h_MF.dtype, made.whole), made.d_gate, made.d_up

    def _recompute_swiglu(
        self,
        gate: SavedTensors,
        up: SavedTensors,
        dtype: torch.dtype,
        d_h_MF: torch.Tensor | None,
        *,
        whole: bool,
    ) -> Backward:
        (codes_gate, of_gate), (codes_up, of_up) = gate, up
        return requantize_swiglu(
            (codes_gate, of_gate),
            (codes_up, of_up),
            dtype,
            d_h_MF,
            power_of_two=self.recipe.input_power_of_two,
            whole=whole,
        )

    def _input(self, x_MK: torch.Tensor) -> Pair:
        """Return x, rounded once for all layers that read it; rows of experts are rounded like others."""
        if isinstance(x_MK, QuantizedInput):
            codes, scales = x_MK.forms
            return codes, scales
        power_of_two = self.recipe.input_power_of_two
        how = "rows", power_of_two
        pair: Pair = self.cache.inputs.get(x_MK, how, lambda: quantize_rows(x_MK, power_of_two=power_of_two))
        return pair

    def _gradient(self, d_y_MN: torch.Tensor) -> Pair:
        recipe = self.recipe
        return quantize_rows(d_y_MN, recipe.gradients, power_of_two=recipe.gradient_power_of_two)

    def _gradient_transposed(self, d_y_MN: torch.Tensor, groups: Groups | None) -> Pair:
        """Return dy for the gradient of the weight: tiles now lie along M."""
        recipe = self.recipe
        return quantize_transposed(
            d_y_MN, groups, recipe.gradients, power_of_two=recipe.gradient_power_of_two
        )

    def _kept_transposed(self, kept: SavedTensors, groups: Groups | None) -> Pair:
        """Return the saved x for the gradient of the weight, rounded again in tiles along M."""
        recipe, (codes_MK, scales) = self.recipe, kept
        how = "columns", recipe.input_power_of_two, groups
        right: Pair = self.cache.transposed.get(
            codes_MK,
            how,
            lambda: requantize_transposed(codes_MK, scales, groups, power_of_two=recipe.input_power_of_two),
        )
        return right


class TritonFP8(Rounded):
    """Products of one weight."""

    def __init__(self, recipe: FP8Recipe, cache: OperandCache | None = None) -> None:
        self.recipe, self.cache = recipe, cache or OperandCache()
        self.read_weight = self.cache.once(quantize_blocks)

    def forward(self, x_MK: torch.Tensor, *weights: torch.Tensor) -> tuple[list[torch.Tensor], SavedTensors]:
        """Return x times each transposed weight, and codes and scales of x."""
        x, ys = self._input(x_MK), []
        for weight in weights:
            blocks, shape = self._blocks(weight), (x_MK.shape[0], weight.shape[0])
            ys.append(multiply(tiles(x), block(blocks.codes_ENK, blocks.scales_Enk), shape, x_MK.dtype))
        return ys, cropped(x, x_MK)

    def dgrad(self, d_y_MN: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return dy times the weight."""
        blocks, shape = self._blocks(weight), (len(d_y_MN), weight.shape[1])
        right = block(blocks.codes_EKN, blocks.scales_Ekn)
        return multiply(tiles(self._gradient(d_y_MN)), right, shape, d_y_MN.dtype)

    def wgrad(self, d_y_MN: torch.Tensor, kept: SavedTensors) -> torch.Tensor:
        """Return the transposed dy times x, in float32."""
        return self._of_transposed(self._gradient_transposed(d_y_MN, None), d_y_MN.shape[1], kept)

    def defer_wgrad(self, d_y_MN: torch.Tensor, kept: SavedTensors) -> Callable[[], torch.Tensor]:
        """Return a function that computes wgrad later, from codes and scales of dy transposed."""
        left = self._gradient_transposed(d_y_MN, None)
        return partial(self._of_transposed, left, d_y_MN.shape[1], kept)

    def _of_transposed(self, left: Pair, N: int, kept: SavedTensors) -> torch.Tensor:
        """Return dy, transposed, times what was kept of x [N, K]."""
        M, K = kept[0].shape
        if not M:
            return kept[1].new_zeros(N, K)
        right = self._kept_transposed(kept, None)
        return multiply(tiles(left), tiles(right), (N, K), torch.float32)


class TritonExperts(Rounded):
    """Products of stacked weights, each with its own rows."""

    def __init__(self, of_one: Rounded, counts_E: torch.Tensor) -> None:
        self.recipe, self.cache, self.read_weight = of_one.recipe, of_one.cache, of_one.read_weight
        self.counts_E = counts_E
        self._groups: Groups | None = None
        if torch.compiler.is_compiling():  # its functions must have no side effects
            self._groups = Groups.of(counts_E, counts_E.device)

    def groups(self, device: torch.device) -> Groups:
        """Return the rows of each weight, computed once."""
        if self._groups is None:
            self._groups = Groups.of(self.counts_E, device)
        return self._groups

    def forward(self, x_MK: torch.Tensor, *weights: torch.Tensor) -> tuple[list[torch.Tensor], SavedTensors]:
        """Return x times each transposed weight, and codes and scales of x."""
        x, groups, ys = self._input(x_MK), self.groups(x_MK.device), []
        for weight in weights:
            blocks, shape = self._blocks(weight), (x_MK.shape[0], weight.shape[1])
            ys.append(multiply_rows(x, (blocks.codes_ENK, blocks.scales_Enk), groups, shape, x_MK.dtype))
        return ys, cropped(x, x_MK)

    def dgrad(self, d_y_MN: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return dy times the weight."""
        blocks, shape = self._blocks(weight), (len(d_y_MN), weight.shape[2])
        right = blocks.codes_EKN, blocks.scales_Ekn
        return multiply_rows(self._gradient(d_y_MN), right, self.groups(d_y_MN.device), shape, d_y_MN.dtype)

    def wgrad(self, d_y_MN: torch.Tensor, kept: SavedTensors) -> torch.Tensor:
        """Return the transposed dy times x, of each weight, in float32."""
        left = self._gradient_transposed(d_y_MN, self.groups(d_y_MN.device))
        return self._of_transposed(left, d_y_MN.shape[1], kept)

    def defer_wgrad(self, d_y_MN: torch.Tensor, kept: SavedTensors) -> Callable[[], torch.Tensor]:
        """Return a function that computes wgrad later, from codes and scales of dy transposed."""
        left = self._gradient_transposed(d_y_MN, self.groups(d_y_MN.device))
        return partial(self._of_transposed, left, d_y_MN.shape[1], kept)

    def _of_transposed(self, left: Pair, N: int, kept: SavedTensors) -> torch.Tensor:
        """Return dy, transposed, times what was kept of x, of each weight [E, N, K]."""
        groups = self.groups(kept[0].device)
        right = self._kept_transposed(kept, groups)
        return multiply_columns(left, right, groups, (N, kept[0].shape[1]))


def cropped(pair: Pair, x_RC: torch.Tensor) -> Pair:
    """Return codes and scales without the padding of ``x``."""
    codes, scales = pair
    return codes[: x_RC.shape[0], : x_RC.shape[1]], scales[: x_RC.shape[0]]


def tiles(pair: Pair) -> Coded:
    """Return an operand in tiles of 1 x 128, for torch's product."""
    return Coded(*pair, "BlockWise1x128")


def block(codes_ERC: torch.Tensor, scales_Erc: torch.Tensor) -> Coded:
    """Return the single one of stacked weights, for torch's product."""
    return Coded(codes_ERC[0], scales_Erc[0].T, "BlockWise128x128")
