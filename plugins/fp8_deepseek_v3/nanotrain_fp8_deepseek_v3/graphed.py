"""The emulation, and products in float32, as torch operators for compiled graphs.

Each operator runs the eager code of :mod:`~nanotrain_fp8_deepseek_v3.gemm`: results are bitwise equal with
any compiler, and the row count of an expert is read when it runs. The compiler sees that layers read the same
input, and merges equal calls in a graph; a weight's prepared form is an input of the graph.

Shapes: M rows, K inputs, N outputs; for stacked weights E; k tiles along K.
"""

from __future__ import annotations

import torch

from nanotrain_core.api.torch import (
    GEMMBackend,
    Prepared,
    QuantizedActivations,
    SavedTensors,
    store_in_selective_checkpointing,
)
from nanotrain_fp8_deepseek_v3.formats import E4M3, E5M2
from nanotrain_fp8_deepseek_v3.gemm import EmulatedFP8, Float32GEMM, FP8Recipe
from nanotrain_fp8_deepseek_v3.mx import EmulatedMX, blocks_of, mx_recipe
from nanotrain_fp8_deepseek_v3.operand_cache import OperandCache

Tensor = torch.Tensor

#: An operator's key for a backend that does not round.
FLOAT32 = "float32"
#: The beginning of one of MX, which ends with the rounding of scales.
MX = "mx "


def key_of(recipe: FP8Recipe) -> str:
    """Return ``recipe`` as an operator's key, without what does not affect products."""
    if recipe.mx:
        return MX + recipe.mx
    gradients = "e5m2" if recipe.gradients is E5M2 else "e4m3"
    return f"{recipe.tile} {gradients} {int(recipe.input_power_of_two)} {int(recipe.gradient_power_of_two)}"


def _eager(key: str, counts_E: Tensor | None) -> Float32GEMM:
    """Return the eager backend of a key, for the given row count of each weight."""
    if key == FLOAT32:
        found = Float32GEMM()
    elif key.startswith(MX):
        found = EmulatedMX(mx_recipe("floor" if key == MX + "floor" else "ceil"))
    else:
        tile, gradients, of_input, of_gradient = key.split()
        form = E5M2 if gradients == "e5m2" else E4M3
        found = EmulatedFP8(FP8Recipe(int(tile), form, bool(int(of_input)), bool(int(of_gradient))))
    return found if counts_E is None else found.grouped(counts_E)


# --- operators --------------------------------------------------------------------------------------


@torch.library.custom_op("nanotrain_fp8::emulated_input", mutates_args=())
def emulated_input(x: Tensor, counts: Tensor | None, key: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return x as it is multiplied, float32 [M, K], and codes [M, K] and scales to save: [M, k], or of MX
    [m, K]."""
    backend = _eager(key, counts)
    assert isinstance(backend, EmulatedFP8)
    values, (codes, scales) = backend.round_input(x)
    return values.contiguous(), codes, scales.contiguous()


@torch.library.custom_op("nanotrain_fp8::emulated_kept", mutates_args=())
def emulated_kept(codes: Tensor, scales: Tensor, counts: Tensor | None, key: str) -> Tensor:
    """Return the saved x, as it is multiplied for the gradient of a weight, float32 [M, K]."""
    return torch.cat(_eager(key, counts).kept_by_group((codes, scales)))


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
    of_x = torch.split(x, backend.groups or [len(x)])
    return backend.weight_gradient(backend.gradients_by_group(d_y), of_x)


@emulated_input.register_fake
def _(x: Tensor, counts: Tensor | None, key: str) -> tuple[Tensor, Tensor, Tensor]:
    values, codes = x.new_empty(x.shape, dtype=torch.float32), x.new_empty(x.shape, dtype=E4M3.dtype)
    if key.startswith(MX):
        rows = blocks_of(x.shape[0], None if counts is None else counts.shape[0])
        return values, codes, x.new_empty(rows, x.shape[1], dtype=torch.uint8)
    tile = int(key.split(maxsplit=1)[0])
    tiles = -(-x.shape[1] // tile) if tile else 1
    return values, codes, x.new_empty(x.shape[0], tiles, dtype=torch.float32)


@emulated_kept.register_fake
def _(codes: Tensor, scales: Tensor, counts: Tensor | None, key: str) -> Tensor:
    return codes.new_empty(codes.shape, dtype=torch.float32)


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
        x, codes, scales = emulated_input(x_MK, self.counts_E, self.key)
        return x, (codes, scales)

    def dgrad(self, d_y_MN: Tensor, weight_NK: Tensor) -> Tensor:
        """Return dy times the weight."""
        d_x: Tensor = emulated_dgrad(d_y_MN, _forms(weight_NK)[-1], self.counts_E, self.key)
        return d_x.to(d_y_MN.dtype)

    def wgrad(self, d_y_MN: Tensor, kept: SavedTensors) -> Tensor:
        """Return the transposed dy times x, in float32."""
        if self.key == FLOAT32:
            x = kept[0].float()
        else:
            x = emulated_kept(kept[0], kept[1], self.counts_E, self.key)
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
        self.in_graph = Products(key_of(recipe), self, None)


class GraphedMX(_Graphed, EmulatedMX):
    """The emulation of MXFP8."""

    def __init__(self, recipe: FP8Recipe, cache: OperandCache | None = None) -> None:
        EmulatedMX.__init__(self, recipe, cache)
        self.in_graph = Products(key_of(recipe), self, None)
