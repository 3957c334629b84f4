"""NVFP4 GEMMs on ``meta``, without values: what a GPU's backend allocates and saves, for a dry run.

Operands are packed, two codes in a byte, with their scales, and are padded as for tensor cores. The scales
of a product, which follow its operands, are of E4M3, which tells a planner what units it takes; its FLOPs are
those of all codes. Rounding reads an operand twice: for the tensor's largest magnitude, and for the codes.

Shapes: M rows, K inputs, N outputs; for stacked weights E.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from nanotrain_core.api.torch import SavedTensors
from nanotrain_fp8_deepseek_v3.dry import Dry
from nanotrain_fp8_deepseek_v3.nvfp4.format import BLOCK
from nanotrain_fp8_deepseek_v3.nvfp4.scaled import ALONG, nvfp4_scaled_mm

Tensor = torch.Tensor


class DryNVFP4(Dry):
    """Packed codes and scales, of the weight and of its transpose."""

    @staticmethod
    def both_ways(weight: Tensor) -> SavedTensors:
        """Return codes and scales of [(E,) N, K] and of [(E,) K, N]."""
        return *coded(weight.detach()), *coded(weight.detach().mT)

    def _operands(self, weight: Tensor) -> SavedTensors:
        """Return those of one weight: each row is multiplied by one of the stacked matrices."""
        forms = self.forms_of(weight)
        return forms if weight.dim() == 2 else tuple(each[0] for each in forms)

    def save_for_wgrad(self, x_MK: Tensor) -> SavedTensors:
        """Return codes and scales of x transposed, once for all layers that read it."""
        made: SavedTensors = self.cache.transposed.get(x_MK, "dry", lambda: self._turned(x_MK))
        return made

    def forward(self, x_MK: Tensor, *weights: Tensor) -> tuple[list[Tensor], SavedTensors]:
        """Return x times each transposed weight, and codes and scales of x transposed."""
        x: SavedTensors = self.cache.inputs.get(x_MK, "dry", lambda: coded(x_MK))
        ys = [times(x, self._operands(weight)[:2], x_MK.dtype) for weight in weights]
        return ys, self.save_for_wgrad(x_MK)

    def dgrad(self, d_y_MN: Tensor, weight: Tensor) -> Tensor:
        """Return dy times the weight."""
        return times(coded(d_y_MN), self._operands(weight)[2:], d_y_MN.dtype)

    def wgrad(self, d_y_MN: Tensor, kept: SavedTensors) -> Tensor:
        """Return the transposed dy times x, in float32, of each weight."""
        return self._of_coded(self._turned(d_y_MN), kept, len(d_y_MN))

    def defer_wgrad(self, d_y_MN: Tensor, kept: SavedTensors) -> Callable[[], Tensor]:
        """Return a function that computes wgrad later, from codes and scales of dy transposed."""
        return partial(self._of_coded, self._turned(d_y_MN), kept, len(d_y_MN))

    def _turned(self, rows: Tensor) -> SavedTensors:
        """Return codes [C, P / 2] and scales: P is M filled up to whole blocks, of each expert."""
        M, C = rows.shape
        return coded(rows, (C, self.blocks_along(M, BLOCK) * BLOCK))

    def _of_coded(self, d_y: SavedTensors, kept: SavedTensors, M: int) -> Tensor:
        """Return the product of M rows: how many are filled up depends on the router."""
        left, right = ((codes[:, : -(-M // 2)], scales) for codes, scales in (d_y, kept))
        return self.of_each_weight(times(left, right, torch.float32))


def coded(x: Tensor, shape: Sequence[int] | None = None) -> SavedTensors:
    """Return packed codes [..., R, C / 2] and scales [..., R, C / 16] of E4M3, C padded for tensor cores.

    Args:
        x: is rounded.
        shape: [..., R, C], if it is not that of ``x``.
    """
    *rows, C = shape or x.shape
    C += -C % ALONG
    for _ in range(2):
        x.sum()  # in place of each pass that reads it: a sum has a value where there are no rows, too
    codes = x.new_empty((*rows, C // 2), dtype=torch.uint8)
    codes.copy_(x.new_empty(()).expand_as(codes))
    return codes, x.new_empty((*rows, C // BLOCK), dtype=torch.float8_e4m3fn)


def times(left: SavedTensors, right: SavedTensors, dtype: torch.dtype) -> Tensor:
    """Return the product of two operands along their rows."""
    whole = left[0].new_empty((), dtype=torch.float32)
    made: Tensor = nvfp4_scaled_mm(left[0], right[0], left[1], right[1], whole, whole, dtype)
    return made
