"""GEMMs with quantized weights, which are dequantized for each GEMM and released after it.

For a precision that only changes how weights are stored. A weight is dequantized twice in a
microbatch, for y and for dgrad: only one is dequantized at any time, or that of all experts of a layer.
"""

from __future__ import annotations

import torch

from nanotrain_core.precision.gemm import GEMMBackend, Kept
from nanotrain_core.precision.quantized_storage import dequantize


class DequantizingGEMM:
    """Unpacks a packed weight, then multiplies as another backend does.

    See :class:`~nanotrain_core.precision.gemm.GEMMBackend`.
    """

    def __init__(self, behind: GEMMBackend) -> None:
        self.behind = behind

    def grouped(self, counts_E: torch.Tensor) -> DequantizingGEMM:
        """Return the same backend for stacked weights."""
        return DequantizingGEMM(self.behind.grouped(counts_E))

    def forward(self, x_MK: torch.Tensor, *weights_NK: torch.Tensor) -> tuple[list[torch.Tensor], Kept]:
        """Return x times each transposed weight, and what the other backend saves of x."""
        outputs = []
        for weight_NK in weights_NK:
            (y_MN,), kept = self.behind.forward(x_MK, dequantize(weight_NK))
            outputs.append(y_MN)
        return outputs, kept

    def keep(self, x_MK: torch.Tensor) -> Kept:
        """Return what the other backend saves of x."""
        return self.behind.keep(x_MK)

    def dgrad(self, d_y_MN: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        """Return dy times the weight."""
        return self.behind.dgrad(d_y_MN, dequantize(weight_NK))

    def wgrad(self, d_y_MN: torch.Tensor, kept: Kept) -> torch.Tensor:
        """Return the transposed dy times x."""
        return self.behind.wgrad(d_y_MN, kept)
