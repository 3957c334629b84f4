"""Forward, dgrad and wgrad of linear layers and experts as separate GEMMs: :class:`CPUGEMM`.

Shapes: M rows, K inputs, N outputs; of stacked weights E.
"""

from __future__ import annotations

import torch
from torch import nn

from nanotrain_core.api import tagged
from nanotrain_core.api.torch import (
    LINEAR_ROLES,
    GEMMBackend,
    Passes,
    SavedTensors,
    TorchGEMM,
    gemm_parameters,
    gemms_of,
    use_gemm,
)
from nanotrain_cpu.grouped import Products, choose_products
from nanotrain_cpu.matmul import matmul, onednn_is_faster_from


class CPUGEMM(TorchGEMM):
    """See :class:`~nanotrain_core.precision.gemm.GEMMBackend`."""

    def matmul(self, a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
        """Return ``a_MK @ b_KN``; either may be a transposed view."""
        return matmul(a_MK, b_KN)

    def grouped(self, counts_E: torch.Tensor) -> GEMMBackend:
        """Return the same for stacked weights."""
        return CPUGroupedGEMM(counts_E)


class CPUGroupedGEMM:
    """The products of stacked weights [E, N, K]. See :class:`~nanotrain_core.precision.gemm.GEMMBackend`."""

    def __init__(self, counts_E: torch.Tensor) -> None:
        self.counts = counts_E.tolist()
        self._chosen: dict[tuple[torch.dtype, torch.Size], Products] = {}

    def forward(
        self, x_MK: torch.Tensor, *weights_ENK: torch.Tensor
    ) -> tuple[list[torch.Tensor], SavedTensors]:
        """Return each weight's rows times its transpose, and x."""
        results = []
        for weight_ENK in weights_ENK:
            products = self._products(x_MK, weight_ENK)
            memory, y = products.room(x_MK, weight_ENK.shape[1])
            for x, weight, out in zip(products.cut(x_MK), products.weights(weight_ENK), y, strict=True):
                products.forward(x, weight, out)
            results.append(products.whole(memory))
        return results, (x_MK,)

    def save_for_wgrad(self, x_MK: torch.Tensor) -> SavedTensors:
        """Return x."""
        return (x_MK,)

    def dgrad(self, d_y_MN: torch.Tensor, weight_ENK: torch.Tensor) -> torch.Tensor:
        """Return each weight's rows of dy times it."""
        products = self._products(d_y_MN, weight_ENK)
        memory, d_x = products.room(d_y_MN, weight_ENK.shape[2])
        for d_y, weight, out in zip(products.cut(d_y_MN), products.weights(weight_ENK), d_x, strict=True):
            products.dgrad(d_y, weight, out)
        return products.whole(memory)

    def wgrad(self, d_y_MN: torch.Tensor, kept: SavedTensors) -> torch.Tensor:
        """Return each weight's rows of dy, transposed, times those of x; zero where there are none."""
        (x_MK,) = kept
        d_weight_ENK = x_MK.new_empty(len(self.counts), d_y_MN.shape[1], x_MK.shape[1])
        products = self._products(d_y_MN, d_weight_ENK)
        pieces = zip(products.cut(d_y_MN), products.cut(x_MK), products.weights(d_weight_ENK), strict=True)
        for d_y, x, out in pieces:
            products.wgrad(d_y, x, out)
        return d_weight_ENK

    def grouped(self, counts_E: torch.Tensor) -> GEMMBackend:
        """Return the same for other rows."""
        return CPUGroupedGEMM(counts_E)

    def _products(self, rows: torch.Tensor, weight_ENK: torch.Tensor) -> Products:
        key = rows.dtype, weight_ENK.shape[1:]
        if key not in self._chosen:
            self._chosen[key] = choose_products(rows, self.counts, weight_ENK)
        return self._chosen[key]


def use_faster_products(part: nn.Module, passes: Passes) -> None:
    """Use :class:`CPUGEMM` for the float32 linear layers of ``part`` that have no GEMM backend.

    Does nothing on processors where no library is faster than the one that ``nn.Linear`` calls.
    """
    if onednn_is_faster_from() == float("inf"):
        return
    backend = CPUGEMM()
    for _, module, tag in tagged(part):
        mine = tag.role in LINEAR_ROLES and bool(gemm_parameters(module)) and gemms_of(module) is None
        if mine and module.weight.dtype == torch.float32:
            use_gemm(module, {"weight": backend}, passes)
