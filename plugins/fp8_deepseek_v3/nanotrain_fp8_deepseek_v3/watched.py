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
from nanotrain_fp8_deepseek_v3.recipe import DY, DY_OF_DW, W_OF_DX, X_OF_DW, LowBitGEMM, W, X
from nanotrain_fp8_deepseek_v3.tallies import Key, Tally

#: Rows in flight to experts on other ranks, and gradients of outputs.
SENT = "sent"


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

    def __init__(self, behind: LowBitGEMM, watch: Watch, name: str, module: nn.Module) -> None:
        self.behind, self.watch, self.name, self.module = behind, watch, name, module
        self.counts_E: torch.Tensor | None = None
        self.recipe = behind.recipe

    def grouped(self, counts_E: torch.Tensor) -> GEMMBackend:
        """Return the same for stacked weights; in a graph, which never counts, the backend's own."""
        behind = self.behind.grouped(counts_E)
        if torch.compiler.is_compiling():
            return behind
        assert isinstance(behind, LowBitGEMM)
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
        if self.watch.counts(self.module) and X_OF_DW in self.recipe.operands:
            self._count_input(whole_of(x_MK), recomputed=True)
        return self.behind.save_for_wgrad(x_MK)

    def dgrad(self, d_y_MN: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Count dy."""
        if self.watch.counts(self.module):
            self._count_rows(DY, d_y_MN)
        return self.behind.dgrad(d_y_MN, weight)

    def wgrad(self, d_y_MN: torch.Tensor, kept: SavedTensors) -> torch.Tensor:
        """Count dy in the tiles that it has here."""
        if self.watch.counts(self.module):
            self._count_rows(DY_OF_DW, d_y_MN)
        return self.behind.wgrad(d_y_MN, kept)

    def defer_wgrad(self, d_y_MN: torch.Tensor, kept: SavedTensors) -> Callable[[], torch.Tensor]:
        """Count dy now: only its codes wait."""
        if self.watch.counts(self.module):
            self._count_rows(DY_OF_DW, d_y_MN)
        return self.behind.defer_wgrad(d_y_MN, kept)

    # --- counts -----------------------------------------------------------------------------------

    def _groups(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows of each weight: no tile spans two."""
        counts_E = self.counts_E
        groups = [rows] if counts_E is None else torch.split(rows, counts_E.tolist())
        return [group.detach() for group in groups if group.numel()]

    def _count_input(self, x_MK: torch.Tensor, *, recomputed: bool) -> None:
        """Count x as it is for y, unless it is recomputed, and as it is for dW, if it is saved for that."""
        of_dw = self.watch.recomputed
        if recomputed and self.name not in of_dw:
            of_dw.add(self.name)
            self.watch.tallies.pop((self.name, X_OF_DW), None)
        if not recomputed:
            self._count_rows(X, x_MK)
        if recomputed == (self.name in of_dw):
            self._count_rows(X_OF_DW, x_MK)

    def _count_rows(self, operand: str, rows: torch.Tensor) -> None:
        """Count an operand of rows, if it is one of the recipe's, weight by weight."""
        if operand in self.recipe.operands:
            for own in self._groups(rows):
                self.watch.of((self.name, operand), own).add(*self.recipe.round(operand, own))

    def _count_weight(self, weight: torch.Tensor) -> None:
        """Count a weight, or several stacked ones, once per step."""
        if (self.name, weight.data_ptr()) in self.watch.seen:
            return
        self.watch.seen.add((self.name, weight.data_ptr()))
        for operand in (W, W_OF_DX):
            if operand in self.recipe.operands:
                self.watch.of((self.name, operand), weight).add(*self.recipe.round(operand, weight))


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


def label(name: str, key: str, backends: Mapping[str, LowBitGEMM]) -> str:
    """Name a module's parameters only if it has several."""
    alike = [other for other, backend in backends.items() if backend is backends[key]]
    return name if len(backends) == 1 else f"{name}.{'+'.join(alike)}"
