"""The three GEMMs of a linear layer in float32, and their exact emulation in FP8.

``y = x W^T``, ``dx = dy W`` and ``dW = dy^T x``. In FP8 each operand is rounded as it is read, in tiles
along the reduction dimension::

                 left, in tiles of       right, in tiles of
    y            x       1 x 128         W  128 x 128
    dx           dy      1 x 128         W  128 x 128
    dW           dy    128 x 1           x  128 x 1, from the 1 x 128 that was kept

Each operand is a code times a scale, rounded once to float32, and products are summed in float32, on CUDA
in float64 (see :mod:`~nanotrain_fp8_deepseek_v3.exact`). Tensor cores sum 128 products in fewer bits, then
promote the sum.

Shapes: M rows, K inputs, N outputs; for stacked weights E.

Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Self, TypeVar

import attrs
import torch

from nanotrain_core.api.torch import GEMMBackend, PreparesWeights, SavedTensors
from nanotrain_fp8_deepseek_v3 import exact, units
from nanotrain_fp8_deepseek_v3.formats import (
    E4M3,
    E5M2,
    TILE,
    Format,
    Tiled,
    dequantize,
    dequantize_columns,
    quantize,
    quantize_groups,
)
from nanotrain_fp8_deepseek_v3.operand_cache import OperandCache
from nanotrain_fp8_deepseek_v3.recipe import DY, DY_OF_DW, X_OF_DW, LowBitGEMM, Recipe, W, X

P = TypeVar("P", bound="Float32GEMM")


class Float32GEMM(PreparesWeights, GEMMBackend):
    """Products in float32 of operands in any dtype."""

    groups: list[int] | None = None
    """Rows of each of several stacked weights; None for one weight."""

    def __init__(self, cache: OperandCache | None = None) -> None:
        """``cache``: the run's; None: outside a run."""
        self.cache = cache or OperandCache()
        self.read_weight = self.cache.once(self.of_weight)

    def grouped(self: P, counts_E: torch.Tensor) -> P:
        """Return the backend for stacked weights."""
        new = copy.copy(self)
        new.groups = counts_E.tolist()
        return new

    # --- operands: float32, as they are multiplied ------------------------------------------------

    def of_weight(self, weight_NK: torch.Tensor) -> SavedTensors:
        """Return the operands for a weight [N, K] or [E, N, K]: of y, and of dx if that is another."""
        return (weight_NK.detach().float(),)

    def prepare(self, weight_NK: torch.Tensor) -> SavedTensors:
        """Return the operands for the weight."""
        return self.read_weight(weight_NK)

    def of_input(self, x_MK: torch.Tensor) -> tuple[torch.Tensor, SavedTensors]:
        """Return x for the product with the weight, and what to save of it."""
        return x_MK.float(), (x_MK,)

    def of_kept(self, kept: SavedTensors) -> torch.Tensor:
        """Return x for the weight's gradient."""
        return kept[0].float()

    def kept_by_group(self, kept: SavedTensors) -> list[torch.Tensor]:
        """Return x for the weights' gradients, split into each weight's rows."""
        return [self.of_kept(own) for own in self.split_kept(kept)]

    def split_kept(self, kept: SavedTensors) -> Iterator[SavedTensors]:
        """Return what was saved of each weight's rows."""
        return zip(*(torch.split(k, self.groups or [len(k)]) for k in kept), strict=True)

    def of_gradient(self, d_y_MN: torch.Tensor, *, for_weight: bool) -> torch.Tensor:
        """Return dy for the gradient of the input, or of the weight."""
        return d_y_MN.float()

    # --- GEMMs ------------------------------------------------------------------------------------

    def multiply(
        self, a_MK: torch.Tensor, b_KN: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``a_MK @ b_KN`` as torch computes it, in TF32 where the user allows that."""
        return torch.mm(a_MK, b_KN) if out is None else torch.mm(a_MK, b_KN, out=out)

    def forward(
        self, x_MK: torch.Tensor, *weights_NK: torch.Tensor
    ) -> tuple[list[torch.Tensor], SavedTensors]:
        """Return x times each transposed weight, and what to save of x."""
        x, kept = self.of_input(x_MK)
        return [self.rows_times(x, self.read_weight(w)[0].mT).to(w.dtype) for w in weights_NK], kept

    def save_for_wgrad(self, x_MK: torch.Tensor) -> SavedTensors:
        """Return what to save of x."""
        return self.of_input(x_MK)[1]

    def dgrad(self, d_y_MN: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        """Return dy times the weight."""
        return self.input_gradient(d_y_MN, self.read_weight(weight_NK)[-1]).to(d_y_MN.dtype)

    def wgrad(self, d_y_MN: torch.Tensor, kept: SavedTensors) -> torch.Tensor:
        """Return the transposed dy times x, in float32."""
        return self.weight_gradient(self.gradients_by_group(d_y_MN), self.kept_by_group(kept))

    def input_gradient(self, d_y_MN: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Return dy times the weight's operand."""
        return self.rows_times(self.of_gradient(d_y_MN, for_weight=False), right)

    def separated(self, x: torch.Tensor, M: int) -> Sequence[torch.Tensor]:
        """Return x for the weights' gradients, of M rows together, as each weight's own."""
        return torch.split(x, self.groups or [M])

    def gradients_by_group(self, d_y_MN: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield, for each weight, the rows of dy that belong to it, as operands of wgrad."""
        for d_y in torch.split(d_y_MN, self.groups or [len(d_y_MN)]):
            yield self.of_gradient(d_y, for_weight=True)

    def weight_gradient(
        self, gradients: Iterable[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the transposed dy times x, for each weight with its own rows; arguments are operands."""
        pieces = zip(gradients, inputs, strict=True)
        if self.groups is None:
            return next(self.multiply(d_y.T, x) for d_y, x in pieces)
        total: torch.Tensor | None = None
        for e, (d_y, x) in enumerate(pieces):
            if total is None:
                total = x.new_zeros(len(self.groups), d_y.shape[1], x.shape[1])
            if len(d_y):
                self.multiply(d_y.T, x, out=total[e])
        assert total is not None
        return total

    def rows_times(self, rows_MK: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Return the rows times [K, N], or each group of rows times its own matrix of [E, K, N]."""
        if self.groups is None:
            return self.multiply(rows_MK, right)
        out = rows_MK.new_empty(len(rows_MK), right.shape[-1])
        for rows, own, place in zip(
            torch.split(rows_MK, self.groups), right, torch.split(out, self.groups), strict=True
        ):
            if len(rows):
                self.multiply(rows, own, out=place)
        return out


@attrs.define(frozen=True)
class FP8Recipe(Recipe):
    """Tiles, or one scale for a tensor, in eight bits."""

    COMPARED = False  # an H100 has multiplied them

    tile: int = TILE
    """Elements along a tile; 0: one scale for a whole tensor; for experts, one for the rows of each."""
    gradients: Format = E4M3
    """Format of dy; x and the weight are E4M3."""
    input_power_of_two: bool = False
    """Round the scales of x to powers of two."""
    gradient_power_of_two: bool = False
    """Round those of dy."""
    quantize_swiglu: bool = False
    """Save the inputs of a SwiGLU whose output the layer reads in eight bits too."""

    @property
    def units(self) -> units.Units:
        """Those of tiles, or of tensors."""
        return units.TILES if self.tile else units.TENSORS

    @property
    def key(self) -> str:
        """``128 e4m3 0 1``."""
        form = "e5m2" if self.gradients is E5M2 else "e4m3"
        return f"{self.tile} {form} {int(self.input_power_of_two)} {int(self.gradient_power_of_two)}"

    @classmethod
    def of_key(cls, key: str) -> Self:
        """Return the recipe of a key."""
        tile, form, of_input, of_gradient = key.split()
        return cls(int(tile), E5M2 if form == "e5m2" else E4M3, bool(int(of_input)), bool(int(of_gradient)))

    @property
    def along_row(self) -> tuple[int, int]:
        """Rows and columns of a tile along a row."""
        return (1, self.tile) if self.tile else (0, 0)

    @property
    def along_column(self) -> tuple[int, int]:
        """Rows and columns of a tile along a column."""
        return (self.tile, 1) if self.tile else (0, 0)

    @property
    def operands(self) -> tuple[str, ...]:
        """The rounded operands, one for each rounding."""
        return (X, W, DY, X_OF_DW, DY_OF_DW) if self.tile else (X, W, DY)

    def round(self, operand: str, x: torch.Tensor) -> tuple[torch.Tensor, Tiled]:
        """Return an operand and its tiles. x of dW is rounded twice; the losses of both roundings count."""
        form, of_gradient = self.gradients, self.gradient_power_of_two
        if operand == W:
            return x, quantize(x, (self.tile, self.tile))
        if operand in (DY, DY_OF_DW):
            tile = self.along_row if operand == DY else self.along_column
            return x, quantize(x, tile, form, power_of_two=of_gradient)
        once = quantize(x, self.along_row, power_of_two=self.input_power_of_two)
        if operand == X:
            return x, once
        return x, quantize(once.values(), self.along_column, power_of_two=self.input_power_of_two)

    def emulated(self, cache: OperandCache | None = None) -> Emulation:
        """Return the emulation, which is the reference, outside graphs."""
        return EmulatedFP8(self, cache)


class FP8GEMM(LowBitGEMM):
    """A backend in eight bits: it saves activations as codes and scales of tiles."""

    recipe: FP8Recipe

    def quantize(self, made_of_MK: torch.Tensor) -> SavedTensors | None:
        """Return codes and scales, or None if the recipe does not request it."""
        if not self.recipe.quantize_swiglu:
            return None
        tiled = quantize(made_of_MK, (1, TILE))
        return tiled.codes(), tiled.scales.flatten(1)

    def dequantize(self, kept: SavedTensors, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantized values."""
        codes_MK, scales = kept
        return dequantize(codes_MK, scales, E4M3).to(dtype)


class Emulation(LowBitGEMM, Float32GEMM):
    """Operands rounded to a format, multiplied in full precision: the reference of every other backend."""

    def multiply(
        self, a_MK: torch.Tensor, b_KN: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``a_MK @ b_KN``, independent of torch's switches."""
        return exact.matmul(a_MK, b_KN, out)

    def of_input(self, x_MK: torch.Tensor) -> tuple[torch.Tensor, SavedTensors]:
        """Return x rounded along its rows, and what to save of it; once for all layers that read it."""
        made: tuple[torch.Tensor, SavedTensors] = self.cache.inputs.get(
            x_MK, (self.recipe, self.rounded_together), lambda: self.round_input(x_MK)
        )
        return made

    @property
    def rounded_together(self) -> list[int] | None:
        """Rows that share no scale with others."""
        return self.groups

    def round_input(self, x_MK: torch.Tensor) -> tuple[torch.Tensor, SavedTensors]:
        """Return what :meth:`of_input` returns, without its cache."""
        raise NotImplementedError

    def kept_like(self, x_MK: torch.Tensor, experts: int | None) -> SavedTensors:
        """Return empty tensors like those that are saved of x, of one weight or so many, for a graph."""
        raise NotImplementedError

    def rows_of_wgrad(self, M: int, experts: int | None) -> int:
        """Return the rows of :meth:`joined`, of one weight or so many."""
        return M

    def kept_by_group(self, kept: SavedTensors) -> list[torch.Tensor]:
        """Return x for the weights' gradients, once for all layers that read it."""
        how = self.recipe, self.groups
        of_groups = super().kept_by_group
        made: list[torch.Tensor] = self.cache.transposed.get(kept[0], how, lambda: of_groups(kept))
        return made

    def joined(self, pieces: Sequence[torch.Tensor], M: int) -> torch.Tensor:
        """Return x of :meth:`kept_by_group`, of M rows, as one tensor with :meth:`rows_of_wgrad` rows."""
        return torch.cat(list(pieces))

    def defer_wgrad(self, d_y_MN: torch.Tensor, kept: SavedTensors) -> Callable[[], torch.Tensor]:
        """Return a function that computes wgrad later, from codes and scales of each weight's rows of dy."""
        coded = [self.keep_gradient(d_y) for d_y in torch.split(d_y_MN, self.groups or [len(d_y_MN)])]
        return partial(self._of_coded, coded, kept)

    def _of_coded(self, coded: Sequence[SavedTensors], kept: SavedTensors) -> torch.Tensor:
        return self.weight_gradient(map(self.of_kept_gradient, coded), self.kept_by_group(kept))

    def keep_gradient(self, d_y_MN: torch.Tensor) -> SavedTensors:
        """Return codes and scales of one weight's rows of dy, for the gradient of the weight."""
        raise NotImplementedError

    def of_kept_gradient(self, kept: SavedTensors) -> torch.Tensor:
        """Return dy as :meth:`of_gradient` does for the weight."""
        raise NotImplementedError


class EmulatedFP8(FP8GEMM, Emulation):
    """The emulation of tiles, and of tensors with one scale."""

    def __init__(self, recipe: FP8Recipe, cache: OperandCache | None = None) -> None:
        super().__init__(cache)
        self.recipe = recipe
        self.along_row, self.along_column = recipe.along_row, recipe.along_column

    @property
    def rounded_together(self) -> list[int] | None:
        """Each weight's rows, unless they have tiles."""
        return None if self.recipe.tile else self.groups

    def of_weight(self, weight_NK: torch.Tensor) -> SavedTensors:
        """Return the weight, rounded in square blocks: transposed they are the same."""
        return (quantize(weight_NK.detach(), (self.recipe.tile, self.recipe.tile)).values(),)

    def round_input(self, x_MK: torch.Tensor) -> tuple[torch.Tensor, SavedTensors]:
        """Return what :meth:`of_input` returns, without its cache."""
        tiled = self._rows(x_MK, E4M3, power_of_two=self.recipe.input_power_of_two)
        alone = not self.recipe.tile and self.groups is None
        scales = tiled.scales.sum().view(1, 1) if alone else tiled.scales.flatten(1)
        kept = tiled.codes(), scales.expand(len(x_MK), -1)
        return tiled.values(), kept

    def _rows(self, rows: torch.Tensor, format_: Format, *, power_of_two: bool) -> Tiled:
        """Scale tiles of each row; without tiles, all rows that are multiplied by one weight together."""
        if self.recipe.tile or self.groups is None:
            return quantize(rows, self.along_row, format_, power_of_two=power_of_two)
        return quantize_groups(rows, self.groups, format_, power_of_two=power_of_two)

    def kept_like(self, x_MK: torch.Tensor, experts: int | None) -> SavedTensors:
        """Return codes [M, K] and scales [M, k]."""
        M, K = x_MK.shape
        tiles = -(-K // self.recipe.tile) if self.recipe.tile else 1
        return x_MK.new_empty(M, K, dtype=E4M3.dtype), x_MK.new_empty(M, tiles, dtype=torch.float32)

    def of_kept(self, kept: SavedTensors) -> torch.Tensor:
        """Return x rounded once more, along its columns."""
        codes_MK, scales = kept
        values = dequantize(codes_MK, scales, E4M3, self.recipe.tile or codes_MK.shape[1])
        if not self.recipe.tile:  # one scale for the whole tensor: there are no other tiles
            return values
        power_of_two = self.recipe.input_power_of_two
        return quantize(values, self.along_column, power_of_two=power_of_two, consume=True).values()

    def of_gradient(self, d_y_MN: torch.Tensor, *, for_weight: bool) -> torch.Tensor:
        """Return dy rounded along the reduction dimension: its rows, or the columns of one weight's rows."""
        form, power_of_two = self.recipe.gradients, self.recipe.gradient_power_of_two
        if not for_weight:
            return self._rows(d_y_MN, form, power_of_two=power_of_two).values()
        return quantize(d_y_MN, self.along_column, form, power_of_two=power_of_two).values()

    def keep_gradient(self, d_y_MN: torch.Tensor) -> SavedTensors:
        """Return codes [M, N] and scales [m, N] of dy, for the gradient of the weight."""
        form, power_of_two = self.recipe.gradients, self.recipe.gradient_power_of_two
        tiled = quantize(d_y_MN, self.along_column, form, power_of_two=power_of_two)
        return tiled.codes(), tiled.scales.squeeze((-3, -1))

    def of_kept_gradient(self, kept: SavedTensors) -> torch.Tensor:
        """Return dy as :meth:`of_gradient` does for the weight."""
        codes_MN, scales = kept
        return dequantize_columns(codes_MN, scales, self.recipe.gradients, self.recipe.tile or len(codes_MN))
