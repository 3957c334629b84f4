"""GEMMs with quantized weights, which are dequantized for each GEMM and released after it.

For a precision that only changes how weights are stored. A weight is dequantized twice in a
microbatch, for y and for dgrad: only one is dequantized at any time, or that of all experts of a layer.
"""

from __future__ import annotations

import torch

from nanotrain_core.precision.gemm import GEMMBackend, Prepared, PreparesWeights, SavedTensors
from nanotrain_core.precision.quantized_storage import PackedWeight, Packing, dequantize


class DequantizingGEMM(PreparesWeights):
    """Unpacks a packed weight, then multiplies as another backend does.

    See :class:`~nanotrain_core.precision.gemm.GEMMBackend`.
    """

    def __init__(self, behind: GEMMBackend, packing: Packing | None = None) -> None:
        """Compute with ``behind``.

        Args:
            behind: multiplies.
            packing: the format of all packed weights that it is given, whose ``unpack`` can be traced. None:
                layers with packed weights stay eager.
        """
        self.behind, self.packing = behind, packing

    def prepare(self, weight_NK: torch.Tensor) -> SavedTensors:
        """Return the rows of a packed weight: a graph unpacks them."""
        return (weight_NK.rows,) if isinstance(weight_NK, PackedWeight) and self.packing is not None else ()

    def _numbers(self, weight: torch.Tensor) -> torch.Tensor:
        if not isinstance(weight, Prepared):
            return dequantize(weight)
        assert self.packing is not None
        return self.packing.unpack(weight.forms[0])[: weight.shape.numel()].view(weight.shape)

    def grouped(self, counts_E: torch.Tensor) -> DequantizingGEMM:
        """Return the same backend for stacked weights."""
        return DequantizingGEMM(self.behind.grouped(counts_E), self.packing)

    def forward(
        self, x_MK: torch.Tensor, *weights_NK: torch.Tensor
    ) -> tuple[list[torch.Tensor], SavedTensors]:
        """Return x times each transposed weight, and what the other backend saves of x."""
        outputs = []
        for weight_NK in weights_NK:
            (y_MN,), kept = self.behind.forward(x_MK, self._numbers(weight_NK))
            outputs.append(y_MN)
        return outputs, kept

    def save_for_wgrad(self, x_MK: torch.Tensor) -> SavedTensors:
        """Return what the other backend saves of x."""
        return self.behind.save_for_wgrad(x_MK)

    def dgrad(self, d_y_MN: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        """Return dy times the weight."""
        return self.behind.dgrad(d_y_MN, self._numbers(weight_NK))

    def wgrad(self, d_y_MN: torch.Tensor, kept: SavedTensors) -> torch.Tensor:
        """Return the transposed dy times x."""
        return self.behind.wgrad(d_y_MN, kept)
