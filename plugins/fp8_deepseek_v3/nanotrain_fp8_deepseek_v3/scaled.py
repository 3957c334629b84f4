"""GEMMs on tensor cores, through ``torch.nn.functional.scaled_mm``.

Its requirements were determined from torch's own checks, which the tests run without a device: the left
operand [M, K] is row-major and the right one [K, N] column-major, so that both are contiguous along the
reduction dimension. K is padded with zeros to whole tiles. Scales of tiles are column-major, [M, K / 128] and
[N, K / 128]; those of blocks too, [K / 128, N / 128], the former padded to a multiple of 4. On Hopper the
library promotes sums to float32 as it goes, unless fast accumulation is requested.

Shapes: M rows, K inputs, N outputs; for stacked weights E; R rows and C columns of anything.

Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.2.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula

from nanotrain_core.api.torch import Prepared, SavedTensors, store_in_selective_checkpointing
from nanotrain_fp8_deepseek_v3.formats import E4M3, TILE, Format, dequantize, quantize
from nanotrain_fp8_deepseek_v3.gemm import FP8GEMM, FP8Recipe
from nanotrain_fp8_deepseek_v3.operand_cache import OperandCache
from nanotrain_fp8_deepseek_v3.recipe import LowBitGEMM, Recipe

#: Rows are padded to this: operands of a tensor core, and their scales, begin at multiples of 16 bytes.
ALIGNED = 16
#: The ``torch.nn.functional.ScalingType`` of MX.
MX = "BlockWise1x32"


@dataclass(frozen=True, eq=False)
class Coded:
    """An operand [R, C], with C the reduction dimension, both padded."""

    codes: torch.Tensor
    """[R, C], C a multiple of 128, row-major."""
    scales: torch.Tensor
    """For tiles [R, C / 128], for blocks [C / 128, R / 128]: both column-major; for a whole tensor a
    scalar; of MX see :mod:`~nanotrain_fp8_deepseek_v3.scaled_mx`."""
    recipe: str
    """The name of its ``torch.nn.functional.ScalingType``."""

    @property
    def tensors(self) -> SavedTensors:
        """What it consists of."""
        return self.codes, self.scales

    def times(self, right: Coded, dtype: torch.dtype) -> torch.Tensor:
        """Return this [M, K] times ``right`` [N, K], transposed, padded as they are."""
        multiplied = scaled_mm if torch.compiler.is_compiling() else multiply_scaled
        y: torch.Tensor = multiplied(
            self.codes, right.codes, self.scales, right.scales, self.recipe, right.recipe, dtype
        )
        return y


def quantize_tiles(
    x_RC: torch.Tensor, format_: Format, *, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round along rows with torch's own operations."""
    tiled = quantize(_filled(x_RC), (1, TILE), format_, power_of_two=power_of_two)
    return tiled.codes(), tiled.scales.flatten(1).T.contiguous().T


class Scaled(LowBitGEMM):
    """See :class:`~nanotrain_core.precision.gemm.GEMMBackend`. Experts are multiplied one after the other."""

    groups: list[int] | None = None
    parts = 2
    """Tensors of an operand."""

    def __init__(self, recipe: Recipe, cache: OperandCache | None = None) -> None:
        self.recipe, self.cache = recipe, cache or OperandCache()
        self.read_weight = self.cache.once(self._of_weight)

    def grouped(self, counts_E: torch.Tensor) -> Self:
        """Return the backend for stacked weights. The host waits for the counts."""
        new = copy.copy(self)
        new.groups = counts_E.tolist()
        return new

    # --- operands ---------------------------------------------------------------------------------

    def _of_input(self, x_RC: torch.Tensor) -> Coded:
        """Return one weight's rows of x."""
        raise NotImplementedError

    def _of_gradient(self, d_y_RC: torch.Tensor) -> Coded:
        """Return one weight's rows of dy, for dx."""
        raise NotImplementedError

    def _of_gradient_turned(self, d_y_MN: torch.Tensor) -> Coded:
        """Return one weight's rows of dy transposed, for dW."""
        return self._of_gradient(d_y_MN.T)

    def _of_one_weight(self, w_NK: torch.Tensor) -> tuple[Coded, Coded]:
        """Return a weight for y, along K, and for dx, along N."""
        raise NotImplementedError

    def _coded(self, tensors: SavedTensors) -> Coded:
        """Return the operand that consists of these tensors: a weight's, or what was saved of x."""
        raise NotImplementedError

    def _weight_gradients(self, gradients: Iterable[Coded], N: int, kept: SavedTensors) -> torch.Tensor:
        """Return dy, transposed, times what was kept of x."""
        raise NotImplementedError

    def _of_inputs(self, x_MK: torch.Tensor) -> list[Coded]:
        """Return x, group by group; for one weight once for all layers that read it."""
        if self.groups is not None:
            return [self._of_input(x) for x in self._split(x_MK)]
        return [self.cache.inputs.get(x_MK, self.recipe, lambda: self._of_input(x_MK))]

    def _of_weight(self, weight: torch.Tensor) -> list[tuple[Coded, Coded]]:
        """Return each weight [N, K] for y and for dx."""
        stacked = weight.detach() if weight.dim() == 3 else weight.detach()[None]
        return [self._of_one_weight(w_NK) for w_NK in stacked]

    def prepare(self, weight: torch.Tensor) -> SavedTensors:
        """Return the codes and scales of each for y, then for dx."""
        return tuple(each for pair in self.read_weight(weight) for one in pair for each in one.tensors)

    def _operands(self, weight: torch.Tensor) -> list[tuple[Coded, Coded]]:
        """Return :meth:`_of_weight`, as prepared for this step."""
        if not isinstance(weight, Prepared):
            return self.read_weight(weight)
        forms, parts = weight.forms, self.parts
        coded = [self._coded(forms[i : i + parts]) for i in range(0, len(forms), parts)]
        return [(coded[i], coded[i + 1]) for i in range(0, len(coded), 2)]

    # --- GEMMs ------------------------------------------------------------------------------------

    def forward(self, x_MK: torch.Tensor, *weights: torch.Tensor) -> tuple[list[torch.Tensor], SavedTensors]:
        """Return x times each transposed weight, and codes and scales of x, group by group."""
        groups, parts = self._split(x_MK), self._of_inputs(x_MK)
        ys = []
        for weight in weights:
            pieces = zip(parts, groups, self._operands(weight), strict=True)
            N = weight.shape[-2]
            ys.append(torch.cat([multiply(a, b, (len(x), N), x.dtype) for a, x, (b, _) in pieces]))
        return ys, kept_of(parts, groups)

    def save_for_wgrad(self, x_MK: torch.Tensor) -> SavedTensors:
        """Return codes and scales of x, group by group."""
        return kept_of(self._of_inputs(x_MK), self._split(x_MK))

    def dgrad(self, d_y_MN: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return dy times the weight."""
        pieces = zip(self._split(d_y_MN), self._operands(weight), strict=True)
        K, of = weight.shape[-1], self._of_gradient
        return torch.cat([multiply(of(d_y), b, (len(d_y), K), d_y.dtype) for d_y, (_, b) in pieces])

    def wgrad(self, d_y_MN: torch.Tensor, kept: SavedTensors) -> torch.Tensor:
        """Return the transposed dy times x, in float32."""
        gradients = map(self._of_gradient_turned, self._split(d_y_MN))
        return self._weight_gradients(gradients, d_y_MN.shape[1], kept)

    def defer_wgrad(self, d_y_MN: torch.Tensor, kept: SavedTensors) -> Callable[[], torch.Tensor]:
        """Return a function that computes wgrad later, from codes and scales of dy transposed."""
        gradients = [self._of_gradient_turned(d_y) for d_y in self._split(d_y_MN)]
        return partial(self._weight_gradients, gradients, d_y_MN.shape[1], kept)

    def _split(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (rows,) if self.groups is None else torch.split(rows, self.groups)


class ScaledFP8(FP8GEMM, Scaled):
    """Tiles, and tensors with one scale."""

    def __init__(self, recipe: FP8Recipe, cache: OperandCache | None = None) -> None:
        Scaled.__init__(self, recipe, cache)
        self.of_weights = "BlockWise128x128" if recipe.tile else "TensorWise"

    # --- operands ---------------------------------------------------------------------------------

    def _along_rows(self, x_RC: torch.Tensor, format_: Format = E4M3, *, power_of_two: bool = False) -> Coded:
        if self.recipe.tile:
            codes, scales = quantize_tiles(aligned(x_RC), format_, power_of_two=power_of_two)
            return Coded(codes, scales, "BlockWise1x128")
        tiled = quantize(aligned(x_RC), (0, 0), format_)
        return Coded(_filled(tiled.codes()), tiled.scales.sum(), "TensorWise")

    def _of_gradient(self, d_y_RC: torch.Tensor) -> Coded:
        form, power_of_two = self.recipe.gradients, self.recipe.gradient_power_of_two
        return self._along_rows(d_y_RC, form, power_of_two=power_of_two)

    def _of_input(self, x_RC: torch.Tensor) -> Coded:
        return self._along_rows(x_RC, power_of_two=self.recipe.input_power_of_two)

    def _of_one_weight(self, w_NK: torch.Tensor) -> tuple[Coded, Coded]:
        """Return a weight for y and for dx. The codes are the same."""
        return self._block(w_NK), self._block(w_NK.T)

    def _coded(self, tensors: SavedTensors) -> Coded:
        codes, scales = tensors
        return Coded(codes, scales, self.of_weights)

    def _block(self, w_RC: torch.Tensor) -> Coded:
        if not self.recipe.tile:
            return self._along_rows(w_RC.contiguous())
        wide = F.pad(w_RC, (0, -w_RC.shape[1] % TILE, 0, -w_RC.shape[0] % TILE))
        tiled = quantize(wide, (TILE, TILE))
        scales_rc = tiled.scales.flatten(1)
        return Coded(tiled.codes(), F.pad(scales_rc, (0, -scales_rc.shape[1] % 4)).T, "BlockWise128x128")

    # --- wgrad ------------------------------------------------------------------------------------

    def _weight_gradients(self, gradients: Iterable[Coded], N: int, kept: SavedTensors) -> torch.Tensor:
        """Return dy, transposed, times what was kept of x: tiles lie along M."""
        pieces = zip(gradients, kept[::2], kept[1::2], strict=True)
        found = [self._weight_gradient(d_y, N, codes, scales) for d_y, codes, scales in pieces]
        return found[0] if self.groups is None else torch.stack(found)

    def _weight_gradient(
        self, d_y: Coded, N: int, codes_MK: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        K = codes_MK.shape[1]
        if not len(codes_MK):
            return scales.new_zeros(N, K, dtype=torch.float32)
        if self.groups is None:  # once for all layers that read x
            right = self.cache.transposed.get(codes_MK, self.recipe, lambda: self._of_kept(codes_MK, scales))
        else:
            right = self._of_kept(codes_MK, scales)
        return multiply(d_y, right, (N, K), torch.float32)

    def _of_kept(self, codes_MK: torch.Tensor, scales: torch.Tensor) -> Coded:
        """Return x transposed, rounded once more if there are tiles."""
        if self.recipe.tile:
            return self._of_input(dequantize(codes_MK, scales, E4M3).T)
        return Coded(_filled(aligned(codes_MK.T)), scales, "TensorWise")


class ScaledBlocks(Scaled):
    """A family that saves x transposed, as it is multiplied for dW, and rounds it from x itself."""

    def forward(self, x_MK: torch.Tensor, *weights: torch.Tensor) -> tuple[list[torch.Tensor], SavedTensors]:
        """Return x times each transposed weight, and what is saved of x transposed, group by group."""
        return super().forward(x_MK, *weights)[0], self.save_for_wgrad(x_MK)

    def save_for_wgrad(self, x_MK: torch.Tensor) -> SavedTensors:
        """Return codes [K, M] and scales of x transposed, group by group."""
        if self.groups is not None:
            return tuple(each for x in self._split(x_MK) for each in self._transposed(x))
        made: SavedTensors = self.cache.transposed.get(x_MK, self.recipe, lambda: self._transposed(x_MK))
        return made

    def _of_input_turned(self, x_MK: torch.Tensor) -> Coded:
        """Return one weight's rows of x transposed, for dW."""
        return self._of_input(x_MK.T)

    def _transposed(self, x_MK: torch.Tensor) -> SavedTensors:
        codes, *scales = self._of_input_turned(x_MK).tensors
        return codes[: x_MK.shape[1]], *scales

    def _weight_gradients(self, gradients: Iterable[Coded], N: int, kept: SavedTensors) -> torch.Tensor:
        """Return dy, transposed, times what was kept of x: blocks lie along M."""
        each = (kept[first : first + self.parts] for first in range(0, len(kept), self.parts))
        found = [
            multiply(d_y, self._coded((aligned(codes_KM), *scales)), (N, len(codes_KM)), torch.float32)
            if codes_KM.shape[1]
            else codes_KM.new_zeros(N, len(codes_KM), dtype=torch.float32)
            for d_y, (codes_KM, *scales) in zip(gradients, each, strict=True)
        ]
        return found[0] if self.groups is None else torch.stack(found)


def kept_of(parts: Sequence[Coded], groups: Sequence[torch.Tensor]) -> SavedTensors:
    """Return codes and scales of each group's rows and columns, without padding."""
    kept: list[torch.Tensor] = []
    for part, x in zip(parts, groups, strict=True):
        scales = part.scales[: len(x)] if part.scales.dim() else part.scales
        kept += [part.codes[: x.shape[0], : x.shape[1]], scales]
    return tuple(kept)


def multiply(left: Coded, right: Coded, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return left [M, K] times right [N, K], transposed, cropped to ``shape``."""
    if not shape[0]:
        return left.scales.new_empty(shape, dtype=dtype)
    return left.times(right, dtype)[: shape[0], : shape[1]]


def multiply_scaled(
    left: torch.Tensor,
    right: torch.Tensor,
    of_left: torch.Tensor,
    of_right: torch.Tensor,
    left_recipe: str,
    right_recipe: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return codes left [M, K] times right [N, K], transposed, with their scales of these ``ScalingType``."""
    for_left, for_right = (getattr(F.ScalingType, recipe) for recipe in (left_recipe, right_recipe))
    product = partial(F.scaled_mm, output_dtype=dtype)
    if left_recipe == MX:
        of_left, of_right = (scales.view(torch.float8_e8m0fnu) for scales in (of_left, of_right))
        order = F.SwizzleType.SWIZZLE_32_4_4
        product = partial(product, swizzle_a=order, swizzle_b=order)
    y: torch.Tensor = product(left, right.T, of_left, for_left, of_right, for_right)
    return y


#: :func:`multiply_scaled` in a graph, whose tracer does not support torch's enumerations.
scaled_mm = torch.library.custom_op("nanotrain_fp8::scaled_mm", multiply_scaled, mutates_args=())
store_in_selective_checkpointing("nanotrain_fp8::scaled_mm")


@scaled_mm.register_fake
def _(
    left: torch.Tensor,
    right: torch.Tensor,
    of_left: torch.Tensor,
    of_right: torch.Tensor,
    left_recipe: str,
    right_recipe: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    return left.new_empty(left.shape[0], right.shape[0], dtype=dtype)


@register_flop_formula(torch.ops.nanotrain_fp8.scaled_mm)
def _flops(left: torch.Size, right: torch.Size, *others: Any, **more: Any) -> int:
    return 2 * left.numel() * right[0]


def _filled(x_RC: torch.Tensor) -> torch.Tensor:
    """Pad columns with zeros to whole tiles, in row-major order."""
    return _zeros_around(x_RC, 0, -x_RC.shape[1] % TILE)


def aligned(x_RC: torch.Tensor) -> torch.Tensor:
    """Pad rows with zeros to a multiple of :data:`ALIGNED`."""
    missing = -len(x_RC) % ALIGNED
    return _zeros_around(x_RC, missing, 0) if missing else x_RC


def _zeros_around(x_RC: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return a copy with more rows and columns; ``F.pad`` does not support eight-bit floats."""
    if not rows and not columns:
        return x_RC.contiguous()
    wide = x_RC.new_zeros(x_RC.shape[0] + rows, x_RC.shape[1] + columns)
    wide[: x_RC.shape[0], : x_RC.shape[1]] = x_RC
    return wide
