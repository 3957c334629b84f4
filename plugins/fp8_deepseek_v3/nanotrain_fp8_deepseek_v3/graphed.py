"""The emulation, and products in float32, as torch operators for compiled graphs.

Each operator runs the eager code of :mod:`~nanotrain_fp8_deepseek_v3.gemm`: results are bitwise equal with
any compiler, and the row count of an expert is read when it runs. The compiler sees that layers read the same
input, and merges equal calls in a graph; a weight's prepared form is an input of the graph.

Shapes: M rows, K inputs, N outputs; for stacked weights E; k tiles along K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from nanotrain_core.api.torch import (
    GEMMBackend,
    Prepared,
    QuantizedActivations,
    SavedTensors,
    store_in_selective_checkpointing,
)
from nanotrain_fp8_deepseek_v3.gemm import EmulatedFP8, Emulation, Float32GEMM, FP8Recipe
from nanotrain_fp8_deepseek_v3.mx import EmulatedMX, MXRecipe
from nanotrain_fp8_deepseek_v3.nvfp4.gemm import EmulatedNVFP4, NVFP4Recipe
from nanotrain_fp8_deepseek_v3.operand_cache import OperandCache
from nanotrain_fp8_deepseek_v3.recipe import Recipe

Tensor = torch.Tensor

#: An operator's key for a backend that does not round.
FLOAT32 = "float32"


@cache
def recipe_of(key: str) -> Recipe:
    """Return the recipe of an operator's key; that of tiles begins with their length."""
    families: dict[str, type[Recipe]] = {"mx": MXRecipe, "nvfp4": NVFP4Recipe}
    return families.get(key.split(maxsplit=1)[0], FP8Recipe).of_key(key)


def _rounding(key: str, counts_E: Tensor | None) -> Emulation:
    """Return the emulation of a key, for the given row count of each weight."""
    found = recipe_of(key).emulated()
    return found if counts_E is None else found.grouped(counts_E)


def _eager(key: str, counts_E: Tensor | None) -> Float32GEMM:
    """Return the eager backend of a key, for the given row count of each weight."""
    if key != FLOAT32:
        return _rounding(key, counts_E)
    return Float32GEMM() if counts_E is None else Float32GEMM().grouped(counts_E)


# --- operators --------------------------------------------------------------------------------------


@torch.library.custom_op("nanotrain_fp8::emulated_input", mutates_args=())
def emulated_input(x: Tensor, counts: Tensor | None, key: str) -> list[Tensor]:
    """Return x as it is multiplied, float32 [M, K], and codes and scales to save: see ``kept_like``."""
    values, kept = _rounding(key, counts).round_input(x)
    return [values.contiguous(), *(each.contiguous() for each in kept)]


@torch.library.custom_op("nanotrain_fp8::emulated_kept", mutates_args=())
def emulated_kept(kept: Sequence[Tensor], counts: Tensor | None, key: str, rows: int) -> Tensor:
    """Return the saved x of so many rows as it is multiplied for the gradient of a weight, float32."""
    backend = _rounding(key, counts)
    return backend.joined(backend.kept_by_group(tuple(kept)), rows)


@torch.library.custom_op("nanotrain_fp8::emulated_forward", mutates_args=())
def emulated_forward(x: Tensor, weight: Tensor, counts: Tensor | None, key: str) -> Tensor:
    """Return x times each transposed weight, float32 [M, N]."""
    return _eager(key, counts).rows_times(x, weight.mT)


@torch.library.custom_op("nanotrain_fp8::emulated_dgrad", mutates_args=())
def emulated_dgrad(d_y: Tensor, weight: Tensor, counts: Tensor | None, key: str) -> Tensor:
    """Return dy times each weight, float32 [M, K]."""
    return _eager(key, counts).input_gradient(d_y, weight)


@torch.library.custom_op("nanotrain_fp8::emulated_wgrad", mutates_args=())
def emulated_wgrad(d_y: Tensor, x: Tensor, counts: Tensor | None, key: str) -> Tensor:
    """Return the transposed dy times x, float32 [N, K] or [E, N, K]."""
    backend = _eager(key, counts)
    return backend.weight_gradient(backend.gradients_by_group(d_y), backend.separated(x, len(d_y)))


@emulated_input.register_fake
def _(x: Tensor, counts: Tensor | None, key: str) -> list[Tensor]:
    kept = recipe_of(key).emulated().kept_like(x, experts_of(counts))
    return [x.new_empty(x.shape, dtype=torch.float32), *kept]


@emulated_kept.register_fake
def _(kept: Sequence[Tensor], counts: Tensor | None, key: str, rows: int) -> Tensor:
    found = recipe_of(key).emulated().rows_of_wgrad(rows, experts_of(counts))
    return kept[0].new_empty(found, kept[0].shape[1], dtype=torch.float32)


@emulated_forward.register_fake
def _(x: Tensor, weight: Tensor, counts: Tensor | None, key: str) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[-2])


@emulated_dgrad.register_fake
def _(d_y: Tensor, weight: Tensor, counts: Tensor | None, key: str) -> Tensor:
    return weight.new_empty(d_y.shape[0], weight.shape[-1])


@emulated_wgrad.register_fake
def _(d_y: Tensor, x: Tensor, counts: Tensor | None, key: str) -> Tensor:
    shape = d_y.shape[1], x.shape[1]
    return x.new_empty(shape if counts is None else (counts.shape[0], *shape))


def experts_of(counts: Tensor | None) -> int | None:
    """Return the number of stacked weights; None for one."""
    return None if counts is None else counts.shape[0]


store_in_selective_checkpointing("nanotrain_fp8::emulated_forward")


# --- backends ---------------------------------------------------------------------------------------


class Products(QuantizedActivations, GEMMBackend):
    """The products of a backend in a graph: see :class:`~nanotrain_core.precision.gemm.GEMMBackend`."""

    def __init__(self, key: str, of_one: QuantizedActivations | None, counts_E: Tensor | None) -> None:
        """``of_one``: quantizes activations; ``counts_E``: rows of each stacked weight; None: one weight."""
        self.key, self.of_one, self.counts_E = key, of_one, counts_E

    def forward(self, x_MK: Tensor, *weights_NK: Tensor) -> tuple[list[Tensor], SavedTensors]:
        """Return x times each transposed weight, and what to keep of x."""
        x, kept = self._input(x_MK)
        made = [emulated_forward(x, _forms(weight)[0], self.counts_E, self.key) for weight in weights_NK]
        return [y.to(weight.dtype) for y, weight in zip(made, weights_NK, strict=True)], kept

    def save_for_wgrad(self, x_MK: Tensor) -> SavedTensors:
        """Return what to keep of x."""
        return self._input(x_MK)[1]

    def _input(self, x_MK: Tensor) -> tuple[Tensor, SavedTensors]:
        if self.key == FLOAT32:
            return x_MK.float(), (x_MK,)
        x, *kept = emulated_input(x_MK, self.counts_E, self.key)
        return x, tuple(kept)

    def dgrad(self, d_y_MN: Tensor, weight_NK: Tensor) -> Tensor:
        """Return dy times the weight."""
        d_x: Tensor = emulated_dgrad(d_y_MN, _forms(weight_NK)[-1], self.counts_E, self.key)
        return d_x.to(d_y_MN.dtype)

    def wgrad(self, d_y_MN: Tensor, kept: SavedTensors) -> Tensor:
        """Return the transposed dy times x, in float32."""
        if self.key == FLOAT32:
            x = kept[0].float()
        else:
            x = emulated_kept(list(kept), self.counts_E, self.key, len(d_y_MN))
        d_w: Tensor = emulated_wgrad(d_y_MN, x, self.counts_E, self.key)
        return d_w

    def grouped(self, counts_E: Tensor) -> GEMMBackend:
        """Return the same for stacked weights."""
        return Products(self.key, self.of_one, counts_E)

    def quantize(self, made_of_MK: Tensor) -> SavedTensors | None:
        """Return the result of the backend."""
        return None if self.of_one is None else self.of_one.quantize(made_of_MK)

    def dequantize(self, kept: SavedTensors, dtype: torch.dtype) -> Tensor:
        """Return the result of the backend."""
        assert self.of_one is not None
        return self.of_one.dequantize(kept, dtype)


def _forms(weight: Tensor) -> SavedTensors:
    """Return a weight's prepared forms, which are inputs of the graph: for y, and for dx."""
    assert isinstance(weight, Prepared)
    return weight.forms


class _Graphed(Float32GEMM):
    """Runs unchanged outside graphs, and in graphs as operators."""

    in_graph: Products

    def forward(self, x_MK: Tensor, *weights_NK: Tensor) -> tuple[list[Tensor], SavedTensors]:
        """Return x times each transposed weight, and what to keep of x."""
        if torch.compiler.is_compiling():
            return self.in_graph.forward(x_MK, *weights_NK)
        return super().forward(x_MK, *weights_NK)

    def save_for_wgrad(self, x_MK: Tensor) -> SavedTensors:
        """Return what to keep of x."""
        return (
            self.in_graph.save_for_wgrad(x_MK)
            if torch.compiler.is_compiling()
            else super().save_for_wgrad(x_MK)
        )

    def dgrad(self, d_y_MN: Tensor, weight_NK: Tensor) -> Tensor:
        """Return dy times the weight."""
        if torch.compiler.is_compiling():
            return self.in_graph.dgrad(d_y_MN, weight_NK)
        return super().dgrad(d_y_MN, weight_NK)

    def wgrad(self, d_y_MN: Tensor, kept: SavedTensors) -> Tensor:
        """Return the transposed dy times x, in float32."""
        if torch.compiler.is_compiling():
            return self.in_graph.wgrad(d_y_MN, kept)
        return super().wgrad(d_y_MN, kept)

    def grouped(self, counts_E: Tensor) -> GEMMBackend:  # type: ignore[override]
        """Return the same for stacked weights."""
        if torch.compiler.is_compiling():
            return self.in_graph.grouped(counts_E)
        return super().grouped(counts_E)


class GraphedFloat32(_Graphed):
    """Products in float32."""

    def __init__(self, cache: OperandCache | None = None) -> None:
        super().__init__(cache)
        self.in_graph = Products(FLOAT32, None, None)


class GraphedEmulation(_Graphed, EmulatedFP8):
    """The emulation of FP8."""

    def __init__(self, recipe: FP8Recipe, cache: OperandCache | None = None) -> None:
        EmulatedFP8.__init__(self, recipe, cache)
        self.in_graph = Products(recipe.key, self, None)


class GraphedMX(_Graphed, EmulatedMX):
    """The emulation of MXFP8."""

    def __init__(self, recipe: MXRecipe, cache: OperandCache | None = None) -> None:
        EmulatedMX.__init__(self, recipe, cache)
        self.in_graph = Products(recipe.key, self, None)


class GraphedNVFP4(_Graphed, EmulatedNVFP4):
    """The emulation of NVFP4."""

    def __init__(self, recipe: NVFP4Recipe, cache: OperandCache | None = None) -> None:
        EmulatedNVFP4.__init__(self, recipe, cache)
        self.in_graph = Products(recipe.key, self, None)


#: What emulates a family of recipes in a run.
GRAPHED: dict[type[Recipe], Callable[..., GEMMBackend]] = {
    FP8Recipe: GraphedEmulation,
    MXRecipe: GraphedMX,
    NVFP4Recipe: GraphedNVFP4,
}
