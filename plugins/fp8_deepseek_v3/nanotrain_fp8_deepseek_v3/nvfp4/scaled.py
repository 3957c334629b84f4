"""NVFP4 on Blackwell's tensor cores, through ``torch.nn.functional.scaled_mm``. **Not yet run on a GPU.**

Operands are packed codes (``float4_e2m1fn_x2``) along what is summed over, padded to a multiple of 32, with
E4M3 scales in the order ``SWIZZLE_32_4_4`` (see :mod:`~nanotrain_fp8_deepseek_v3.scaled_mx`) and a float32
scale of the tensor. Rounding is plain PyTorch, the emulation's own.

Shapes: M rows, K inputs, N outputs; for stacked weights E; R rows and C columns of anything, C along the sum.

Source: torch's own checks, which the tests run without a device; NVIDIA, cuBLAS documentation, "1D Block
Scaling Factors Layout".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula

from nanotrain_core.api.torch import SavedTensors, store_in_selective_checkpointing
from nanotrain_fp8_deepseek_v3.nvfp4.format import BLOCK, pack
from nanotrain_fp8_deepseek_v3.nvfp4.gemm import ROW, NVFP4Recipe
from nanotrain_fp8_deepseek_v3.operand_cache import OperandCache
from nanotrain_fp8_deepseek_v3.recipe import DY, DY_OF_DW, W_OF_DX, X_OF_DW, W, X
from nanotrain_fp8_deepseek_v3.scaled import ALIGNED, Coded, ScaledBlocks
from nanotrain_fp8_deepseek_v3.scaled_mx import swizzled

#: Numbers of a row are padded to a multiple of this: 16 bytes.
ALONG = 32
KIND = "BlockWise1x16"


@dataclass(frozen=True, eq=False)
class CodedNVFP4(Coded):
    """An operand [R, C]: codes [R, C / 2], and scales as bytes in the order of tensor cores."""

    of_tensor: torch.Tensor
    """[], float32."""

    @property
    def tensors(self) -> SavedTensors:
        """What it consists of."""
        return self.codes, self.scales, self.of_tensor

    def times(self, right: Coded, dtype: torch.dtype) -> torch.Tensor:
        """Return this [M, K] times ``right`` [N, K], transposed, padded as they are."""
        assert isinstance(right, CodedNVFP4)
        multiplied = nvfp4_scaled_mm if torch.compiler.is_compiling() else multiply_nvfp4
        y: torch.Tensor = multiplied(
            self.codes, right.codes, self.scales, right.scales, self.of_tensor, right.of_tensor, dtype
        )
        return y


class ScaledNVFP4(ScaledBlocks):
    """Operands of :class:`~nanotrain_fp8_deepseek_v3.nvfp4.gemm.NVFP4Recipe`."""

    recipe: NVFP4Recipe
    parts = 3

    def __init__(self, recipe: NVFP4Recipe, cache: OperandCache | None = None) -> None:
        super().__init__(recipe, cache)

    def _along_rows(self, operand: str, x_RC: torch.Tensor, tile: tuple[int, int] = ROW) -> Coded:
        blocks = self.recipe.blocks(operand, x_RC, tile)
        codes = blocks.codes()[: len(x_RC)]  # 16 x 16 may have filled up rows
        scales_rc = blocks.scales.squeeze(-1).squeeze(-2)
        if tile != ROW:
            scales_rc = scales_rc.repeat_interleave(tile[0], 0)[: len(x_RC)]
        rows, columns = -len(codes) % ALIGNED, -codes.shape[1] % ALONG
        packed = pack(F.pad(codes, (0, columns, 0, rows)), -1)
        stored = F.pad(scales_rc.to(torch.float8_e4m3fn).view(torch.uint8), (0, columns // BLOCK, 0, rows))
        return CodedNVFP4(packed, swizzled(stored), KIND, blocks.tensor_scale.view(()))

    def _of_input(self, x_RC: torch.Tensor) -> Coded:
        return self._along_rows(X, x_RC)

    def _of_input_turned(self, x_MK: torch.Tensor) -> Coded:
        return self._along_rows(X_OF_DW, x_MK.T)

    def _of_gradient(self, d_y_RC: torch.Tensor) -> Coded:
        return self._along_rows(DY, d_y_RC)

    def _of_gradient_turned(self, d_y_MN: torch.Tensor) -> Coded:
        return self._along_rows(DY_OF_DW, d_y_MN.T)

    def _of_one_weight(self, w_NK: torch.Tensor) -> tuple[Coded, Coded]:
        """Return a weight for y and for dx: of 16 x 16 codes and scales are the same, turned."""
        tile = self.recipe.tile_of(W)
        return self._along_rows(W, w_NK, tile), self._along_rows(W_OF_DX, w_NK.T, tile)

    def _coded(self, tensors: SavedTensors) -> Coded:
        codes, scales, of_tensor = tensors
        return CodedNVFP4(codes, scales, KIND, of_tensor)


def multiply_nvfp4(
    left: torch.Tensor,
    right: torch.Tensor,
    scales_left: torch.Tensor,
    scales_right: torch.Tensor,
    of_left: torch.Tensor,
    of_right: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return packed codes left [M, K / 2] times right [N, K / 2], transposed, [M, N].

    Args:
        left: uint8.
        right: uint8.
        scales_left: bytes of E4M3, in the order of tensor cores.
        scales_right: those of ``right``.
        of_left: the scale of the tensor, float32.
        of_right: that of ``right``.
        dtype: of the result.
    """
    a, b = (codes.view(torch.float4_e2m1fn_x2) for codes in (left, right))
    sa, sb = (scales.view(torch.float8_e4m3fn) for scales in (scales_left, scales_right))
    kinds = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    orders = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    y: torch.Tensor = F.scaled_mm(
        a,
        b.T,
        [sa, of_left],
        kinds,
        [sb, of_right],
        kinds,
        swizzle_a=orders,
        swizzle_b=orders,
        output_dtype=dtype,
    )
    return y


#: :func:`multiply_nvfp4` in a graph, whose tracer does not support torch's enumerations.
nvfp4_scaled_mm = torch.library.custom_op("nanotrain_fp8::nvfp4_scaled_mm", multiply_nvfp4, mutates_args=())
store_in_selective_checkpointing("nanotrain_fp8::nvfp4_scaled_mm")


@nvfp4_scaled_mm.register_fake
def _(
    left: torch.Tensor,
    right: torch.Tensor,
    scales_left: torch.Tensor,
    scales_right: torch.Tensor,
    of_left: torch.Tensor,
    of_right: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    return left.new_empty(left.shape[0], right.shape[0], dtype=dtype)


@register_flop_formula(torch.ops.nanotrain_fp8.nvfp4_scaled_mm)
def _flops(left: torch.Size, right: torch.Size, *others: Any, **more: Any) -> int:
    return 2 * (2 * left.numel()) * right[0]  # two numbers in a byte
