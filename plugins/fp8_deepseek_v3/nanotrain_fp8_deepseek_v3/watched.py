"""GEMMs whose operands are counted on watched steps, in the tiles that each GEMM uses.

Counting rounds an operand once more than the product does, with torch's own operations on any device. The
product's inputs and results are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from nanotrain_core.api.torch import (
    DispatchCodec,
    GEMMBackend,
    PreparesWeights,
    QuantizedActivations,
    QuantizedInput,
    SavedTensors,
    gemms_of,
)
from nanotrain_fp8_deepseek_v3.formats import E4M3, TILE, quantize
from nanotrain_fp8_deepseek_v3.gemm import FP8GEMM, FP8Recipe
from nanotrain_fp8_deepseek_v3.tallies import Key, Tally

#: Operands: of y = x W^T and dx = dy W, and of dW = dy^T x if its tiles differ.
X, W, DY, X_OF_DW, DY_OF_DW = "x", "W", "dy", "x of dW", "dy of dW"
#: Of dx, in MX: elsewhere the weight is rounded in the same blocks for both.
W_OF_DX = "W of dx"
#: Rows in flight to experts on other ranks, and gradients of outputs.
SENT = "sent"


def operands_of(recipe: FP8Recipe) -> tuple[str, ...]:
    """Return the rounded operands, one for each rounding."""
    if recipe.mx:
        return X, W, DY, W_OF_DX, X_OF_DW, DY_OF_DW
    return (X, W, DY, X_OF_DW, DY_OF_DW) if recipe.tile else (X, W, DY)


class Watch:
    """All tallies of a watched step."""

    def __init__(self) -> None:
        self.on = False
        self.tallies: dict[Key, Tally] = {}
        self.seen: set[tuple[str, int]] = set()
        """Weights that were counted in this step, by module and address."""
        self.recomputed: set[str] = set()
        """Modules whose input is recomputed for the gradient of the weight: it is counted then."""

    def begin(self, *, on: bool) -> None:
        """Reset the counts, and count from now on if ``on``."""
        self.on = on
        self.tallies.clear()
        self.seen.clear()

    def counts(self, module: nn.Module) -> bool:
        """Return whether to count a pass: one of the watched step, and no replay."""
        gemms = gemms_of(module)
        return self.on and (gemms is None or gemms.passes.counted)

    def counts_forward(self, module: nn.Module) -> bool:
        """Return whether to count a forward pass: one of training, and not a recomputation."""
        return self.counts(module) and module.training and not in_backward(module)

    def of(self, key: Key, x: torch.Tensor) -> Tally:
        """Return the tally of an operand."""
        if key not in self.tallies:
            self.tallies[key] = Tally.on(x.device)
        return self.tallies[key]


class Watched(QuantizedActivations, PreparesWeights, GEMMBackend):
    """Counts the operands of another backend."""

    def __init__(self, behind: FP8GEMM, watch: Watch, name: str, module: nn.Module) -> None:
        self.behind, self.watch, self.name, self.module = behind, watch, name, module
        self.counts_E: torch.Tensor | None = None
        self.recipe = behind.recipe
        tile = self.recipe.tile
        self.along_row, self.along_column = ((1, tile), (tile, 1)) if tile else ((0, 0), (0, 0))

    def grouped(self, counts_E: torch.Tensor) -> GEMMBackend:
        """Return the same for stacked weights; in a graph, which never counts, the backend's own."""
        behind = self.behind.grouped(counts_E)
        if torch.compiler.is_compiling():
            return behind
        assert isinstance(behind, FP8GEMM)
        new = Watched(behind, self.watch, self.name, self.module)
        new.counts_E = counts_E
        return new

    def prepare(self, weight: torch.Tensor) -> SavedTensors:
        """Delegate."""
        return self.behind.prepare(weight)

    def quantize(self, made_of_MK: torch.Tensor) -> SavedTensors | None:
        """Delegate: what is computed from it is counted."""
        return self.behind.quantize(made_of_MK)

    def dequantize(self, kept: SavedTensors, dtype: torch.dtype) -> torch.Tensor:
        """Delegate."""
        return self.behind.dequantize(kept, dtype)

    def swiglu(
        self, gate_MF: torch.Tensor, up_MF: torch.Tensor, *, whole: bool = False
    ) -> tuple[QuantizedInput, SavedTensors, SavedTensors] | None:
        """Delegate, and request h itself when it is counted."""
        return self.behind.swiglu(gate_MF, up_MF, whole=whole or self._counts_whole())

    def recompute_swiglu(
        self, gate: SavedTensors, up: SavedTensors, dtype: torch.dtype, *, whole: bool = False
    ) -> QuantizedInput | None:
        """Delegate, and request h itself when it is counted."""
        return self.behind.recompute_swiglu(gate, up, dtype, whole=whole or self._counts_whole())

    def swiglu_backward(
        self, gate: SavedTensors, up: SavedTensors, d_h_MF: torch.Tensor, *, whole: bool = False
    ) -> tuple[QuantizedInput, torch.Tensor, torch.Tensor] | None:
        """Delegate, and request h itself when it is counted."""
        return self.behind.swiglu_backward(gate, up, d_h_MF, whole=whole or self._counts_whole())

    def _counts_whole(self) -> bool:
        return not torch.compiler.is_compiling() and self.watch.counts(self.module)

    # --- GEMMs ------------------------------------------------------------------------------------

    def forward(self, x_MK: torch.Tensor, *weights: torch.Tensor) -> tuple[list[torch.Tensor], SavedTensors]:
        """Count x and the weights."""
        if self.watch.counts_forward(self.module):
            self._count_input(whole_of(x_MK), recomputed=False)
            for weight in weights:
                self._count_weight(weight.detach())
        return self.behind.forward(x_MK, *weights)

    def save_for_wgrad(self, x_MK: torch.Tensor) -> SavedTensors:
        """Count x, which was recomputed."""
        if self.watch.counts(self.module) and self.recipe.tile:
            self._count_input(whole_of(x_MK), recomputed=True)
        return self.behind.save_for_wgrad(x_MK)

    def dgrad(self, d_y_MN: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Count dy."""
        if self.watch.counts(self.module):
            self._count_gradient(DY, d_y_MN, self.along_row)
        return self.behind.dgrad(d_y_MN, weight)

    def wgrad(self, d_y_MN: torch.Tensor, kept: SavedTensors) -> torch.Tensor:
        """Count dy in the tiles that it has here."""
        if self.watch.counts(self.module) and self.recipe.tile:
            self._count_gradient(DY_OF_DW, d_y_MN, self.along_column)
        return self.behind.wgrad(d_y_MN, kept)

    def defer_wgrad(self, d_y_MN: torch.Tensor, kept: SavedTensors) -> Callable[[], torch.Tensor]:
        """Count dy now: only its codes wait."""
        if self.watch.counts(self.module) and self.recipe.tile:
            self._count_gradient(DY_OF_DW, d_y_MN, self.along_column)
        return self.behind.defer_wgrad(d_y_MN, kept)

    # --- counts -----------------------------------------------------------------------------------

    def _tally(self, operand: str, x: torch.Tensor) -> Tally:
        return self.watch.of((self.name, operand), x)

    def _groups(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows of each weight: no tile spans two."""
        counts_E = self.counts_E
        groups = [rows] if counts_E is None else torch.split(rows, counts_E.tolist())
        return [group.detach() for group in groups if group.numel()]

    def _count_input(self, x_MK: torch.Tensor, *, recomputed: bool) -> None:
        """Count x along its rows, unless it is recomputed, and along its columns, if it is saved for them.

        The latter is rounded twice, except in MX; the losses of both roundings count.
        """
        of_dw, power_of_two, mx = self.watch.recomputed, self.recipe.input_power_of_two, self.recipe.mx
        if recomputed and self.name not in of_dw:
            of_dw.add(self.name)
            self.watch.tallies.pop((self.name, X_OF_DW), None)
        for x in self._groups(x_MK):
            once = quantize(x, self.along_row, power_of_two=power_of_two, e8m0=mx)
            values = once.values() if recomputed else self._tally(X, x).add(x, once)
            if self.recipe.tile and recomputed == (self.name in of_dw):
                source = x if mx else values
                twice = quantize(source, self.along_column, power_of_two=power_of_two, e8m0=mx)
                self._tally(X_OF_DW, x).add(x, twice)

    def _count_weight(self, weight: torch.Tensor) -> None:
        """Count a weight, or several stacked ones, once per step."""
        if (self.name, weight.data_ptr()) in self.watch.seen:
            return
        self.watch.seen.add((self.name, weight.data_ptr()))
        tile, mx = self.recipe.tile, self.recipe.mx
        ways = {W: self.along_row, W_OF_DX: self.along_column} if mx else {W: (tile, tile)}
        for operand, way in ways.items():
            self._tally(operand, weight).add(weight, quantize(weight, way, e8m0=mx))

    def _count_gradient(self, operand: str, d_y_MN: torch.Tensor, tile: tuple[int, int]) -> None:
        form, power_of_two, mx = self.recipe.gradients, self.recipe.gradient_power_of_two, self.recipe.mx
        for d_y in self._groups(d_y_MN):
            blocks = quantize(d_y, tile, form, power_of_two=power_of_two, e8m0=mx)
            self._tally(operand, d_y).add(d_y, blocks)


def whole_of(x_MK: torch.Tensor) -> torch.Tensor:
    """Return an input itself, which a backend may have quantized before."""
    if not isinstance(x_MK, QuantizedInput):
        return x_MK
    assert x_MK.whole is not None
    return x_MK.whole


class WatchedCodec:
    """Counts rows that are sent to experts. See :class:`~nanotrain_core.moe.routing.DispatchCodec`."""

    def __init__(self, behind: DispatchCodec, watch: Watch, name: str, module: nn.Module) -> None:
        self.behind, self.watch, self.name, self.module = behind, watch, name, module

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Count rows or gradients, and encode them. Rows in backward that need a gradient are recomputed."""
        recomputed = rows.requires_grad and in_backward(self.module)
        if self.watch.counts(self.module) and self.module.training and rows.numel() and not recomputed:
            x = rows.detach()
            self.watch.of((self.name, SENT), x).add(x, quantize(x, (1, TILE), E4M3, power_of_two=True))
        return self.behind.encode(rows)

    def decode(self, coded: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Delegate."""
        return self.behind.decode(coded, width, dtype)


def in_backward(module: nn.Module) -> bool:
    """Return whether a backward pass of the run that ``module`` belongs to is running."""
    gemms = gemms_of(module)
    return gemms is not None and gemms.passes.in_backward


def label(name: str, key: str, backends: Mapping[str, FP8GEMM]) -> str:
    """Name a module's parameters only if it has several."""
    alike = [other for other, backend in backends.items() if backend is backends[key]]
    return name if len(backends) == 1 else f"{name}.{'+'.join(alike)}"
