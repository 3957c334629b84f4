"""Products with weights that are packed: unpacked for each, and forgotten after it.

A weight is unpacked twice in a microbatch, for y and for the gradient of x. Only one weight is ever there in
bfloat16, or that of all experts of one layer.
"""

from __future__ import annotations

import torch

from nanotrain_core.builtin.row_products import RowProducts
from nanotrain_core.packed import numbers_of


class UnpackedProducts(RowProducts):
    """The products of bfloat16, of what packed weights hold."""

    def read_weight(self, weight_NK: torch.Tensor) -> torch.Tensor:
        """Unpack a weight [N, K] or [E, N, K]."""
        return numbers_of(weight_NK)
