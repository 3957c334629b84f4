"""GEMMs by Transformer Engine, with operands that it rounds itself. **Not yet run on a GPU.**

Imported only if it is installed and a recipe requests it. Its GEMMs take the weight first. Each
operand is stored row-wise, in tiles of 1 x 128, column-wise, in tiles of 128 x 1, or both::

    layout    A              B              returns
    TN        W  by rows     x   by rows    y  = B A^T
    NN        W  by columns  dy  by rows    dx = B A
    NT        x  by columns  dy  by columns dW = B^T A

Unlike DeepSeek-V3 it rounds x column-wise from x itself, not from the saved rows: once, not twice.

Shapes: M rows, K inputs, N outputs; for stacked weights E.

Source: Transformer Engine 2.3 and later, ``Float8BlockQuantizer`` and ``general_gemm``.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

from nanotrain_core.api import NanotrainError
from nanotrain_core.api.torch import SavedTensors
from nanotrain_fp8_deepseek_v3.formats import E4M3
from nanotrain_fp8_deepseek_v3.gemm import FP8GEMM, FP8Recipe
from nanotrain_fp8_deepseek_v3.operand_cache import OperandCache
from nanotrain_fp8_deepseek_v3.scaled import ALIGNED


class TransformerEngineFP8(FP8GEMM):
    """See :class:`~nanotrain_core.precision.gemm.GEMMBackend`."""

    groups: list[int] | None = None

    def __init__(self, recipe: FP8Recipe, cache: OperandCache | None = None) -> None:
        self.recipe = recipe
        self.read_weight = (cache or OperandCache()).once(self._of_weight)

    def grouped(self, counts_E: torch.Tensor) -> TransformerEngineFP8:
        """Return the backend for stacked weights. The host waits for the counts."""
        new = copy.copy(self)
        new.groups = counts_E.tolist()
        return new

    # --- operands ---------------------------------------------------------------------------------

    def _of_weight(self, weight: torch.Tensor) -> list[Any]:
        stacked = weight.detach() if weight.dim() == 3 else weight.detach()[None]
        quantizer = quantizer_of(power_of_two=False, rows=True, columns=True, dim=2)
        return [quantizer(aligned(w_NK)) for w_NK in stacked]

    def _of_input(self, x_MK: torch.Tensor, *, rows: bool) -> Any:
        power = self.recipe.input_power_of_two
        return quantizer_of(power_of_two=power, rows=rows, columns=True, dim=1)(aligned(x_MK))

    def _of_gradient(self, d_y_MN: torch.Tensor, *, rows: bool) -> Any:
        power = self.recipe.gradient_power_of_two
        return quantizer_of(power_of_two=power, rows=rows, columns=not rows, dim=1)(aligned(d_y_MN))

    # --- GEMMs ------------------------------------------------------------------------------------

    def forward(self, x_MK: torch.Tensor, *weights: torch.Tensor) -> tuple[list[torch.Tensor], SavedTensors]:
        """Return x times each transposed weight, and x by columns, group by group."""
        groups = self._split(x_MK)
        rounded: list[Any] = [self._of_input(x, rows=True) if len(x) else x for x in groups]
        ys = []
        for weight in weights:
            pieces = zip(groups, rounded, self.read_weight(weight), strict=True)
            ys.append(torch.cat([product(w, q, "TN", x, (len(x), weight.shape[-2])) for x, q, w in pieces]))
        for x, q in zip(groups, rounded, strict=True):
            if len(x):
                q.update_usage(rowwise_usage=False, columnwise_usage=True)
        return ys, tuple(rounded)

    def save_for_wgrad(self, x_MK: torch.Tensor) -> SavedTensors:
        """Return x by columns, group by group."""
        return tuple(self._of_input(x, rows=False) if len(x) else x for x in self._split(x_MK))

    def dgrad(self, d_y_MN: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return dy times the weight."""
        found = []
        for d_y, w in zip(self._split(d_y_MN), self.read_weight(weight), strict=True):
            q = self._of_gradient(d_y, rows=True) if len(d_y) else d_y
            found.append(product(w, q, "NN", d_y, (len(d_y), weight.shape[-1])))
        return torch.cat(found)

    def wgrad(self, d_y_MN: torch.Tensor, kept: SavedTensors) -> torch.Tensor:
        """Return the transposed dy times x, in float32."""
        d_w: torch.Tensor = self.defer_wgrad(d_y_MN, kept)()
        return d_w

    def defer_wgrad(self, d_y_MN: torch.Tensor, kept: SavedTensors) -> Callable[[], torch.Tensor]:
        """Return a function that computes wgrad later, from dy rounded column-wise."""
        groups = self._split(d_y_MN)
        rounded: list[Any] = [self._of_gradient(d_y, rows=False) if len(d_y) else d_y for d_y in groups]
        rows = [d_y.new_empty(len(d_y), 0) for d_y in groups]  # their number and dtype, no memory
        return partial(self._of_columns, rounded, rows, d_y_MN.shape[1], kept)

    def _of_columns(
        self, rounded: Sequence[Any], rows: Sequence[torch.Tensor], N: int, kept: SavedTensors
    ) -> torch.Tensor:
        pieces = zip(kept, rounded, rows, strict=True)
        found = [product(x, q, "NT", like, (N, x.shape[1])) for x, q, like in pieces]
        return found[0] if self.groups is None else torch.stack(found)

    def _split(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (rows,) if self.groups is None else torch.split(rows, self.groups)


def quantizer_of(*, power_of_two: bool, rows: bool, columns: bool, dim: int) -> Any:
    """Return a quantizer to E4M3 in tiles (``dim`` 1) or blocks (2) of 128."""
    return Float8BlockQuantizer(
        TE_DType[E4M3.dtype],
        rowwise=rows,
        columnwise=columns,
        force_pow_2_scales=power_of_two,
        block_scaling_dim=dim,
    )


def product(a: Any, b: Any, layout: str, like: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return the product of two rounded operands; zeros where ``like`` has no rows.

    It has the dtype of ``like``, and the gradient of a weight has float32.
    """
    dtype = torch.float32 if layout == "NT" else like.dtype
    if not len(like):
        return like.new_zeros(shape, dtype=dtype)
    extra: dict[str, Any] = {}
    if "workspace" in inspect.signature(general_gemm).parameters:  # until some 2.9
        from transformer_engine.pytorch.module.base import get_workspace

        extra = {"workspace": get_workspace()}
    y, *_ = general_gemm(
        a, b, out_dtype=dtype, layout=layout, use_split_accumulator=True, grad=layout != "TN", **extra
    )
    found: torch.Tensor = y[: shape[0]]
    return found


def aligned(x_RC: torch.Tensor) -> torch.Tensor:
    """Pad rows with zeros to a multiple that tensor cores support.

    Raises:
        NanotrainError: the columns, which the model determines, are not such a multiple.
    """
    R, C = x_RC.shape
    if C % ALIGNED:
        raise NanotrainError(f"precision.backend: 'te' multiplies multiples of {ALIGNED}, this width is {C}")
    return F.pad(x_RC, (0, 0, 0, -R % ALIGNED)).contiguous()
