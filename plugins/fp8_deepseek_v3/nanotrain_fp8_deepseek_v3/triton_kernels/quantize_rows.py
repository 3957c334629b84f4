"""Tiles of 1 x 128: the left operand of y and dx."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanotrain_fp8_deepseek_v3.formats import E4M3, TILE, Format
from nanotrain_fp8_deepseek_v3.triton_kernels.arithmetic import divided, magnitudes, scale_of
from nanotrain_fp8_deepseek_v3.triton_kernels.layout import filled

#: Rows per program: 8 KB of bfloat16, 64 bytes for each of its threads.
ROWS = 32


@triton.jit  # type: ignore[untyped-decorator]
def round_rows(  # type: ignore[no-untyped-def]
    x_ptr,
    codes_ptr,
    scales_ptr,
    R,
    C,
    x_row,
    x_column,
    codes_row,
    scales_tile,
    LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Round ``ROWS`` tiles. Neighbors in the grid are neighbors in a row; rows beyond R are zeros."""
    tiles = codes_row // TILE
    tile = tl.program_id(0) % tiles
    r = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tile * TILE + tl.arange(0, TILE)
    x_ptrs = x_ptr + r[:, None] * x_row + c[None, :].to(tl.int64) * x_column
    x = tl.load(x_ptrs, mask=(r[:, None] < R) & (c[None, :] < C), other=0.0).to(tl.float32)
    store_rounded(x, codes_ptr, scales_ptr, r, c, tile, codes_row, scales_tile, LARGEST, POWER_OF_TWO)


@triton.jit  # type: ignore[untyped-decorator]
def store_rounded(  # type: ignore[no-untyped-def]
    x,
    codes_ptr,
    scales_ptr,
    r,
    c,
    tile,
    codes_row,
    scales_tile,
    LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Round a tile of each row ``r`` of float32 ``x`` [rows, 128], and store codes and scales."""
    scale = scale_of(tl.max(magnitudes(x), 1), LARGEST, POWER_OF_TWO)
    codes = divided(x, scale[:, None]).to(codes_ptr.dtype.element_ty)
    inside = r < scales_tile
    tl.store(codes_ptr + r[:, None] * codes_row + c[None, :], codes, mask=inside[:, None])
    tl.store(scales_ptr + tile.to(tl.int64) * scales_tile + r, scale, mask=inside)


def quantize_rows(
    x_RC: torch.Tensor, format_: Format = E4M3, *, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [R', C'] row-major and scales [R', C' / 128] column-major.

    Rows are padded to a multiple of 16, columns to whole tiles. ``x`` may have any strides.
    """
    rounded = _in_graph if torch.compiler.is_compiling() else _launch
    codes, scales = rounded(x_RC, format_.dtype, power_of_two)
    return codes, scales.T


def _launch(x_RC: torch.Tensor, dtype: torch.dtype, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [R', C'] and scales [C' / 128, R'], both row-major."""
    codes, scales = empty_rows(x_RC, dtype)
    (R, C), (tiles, rows) = x_RC.shape, scales.shape
    if codes.numel():
        round_rows[(triton.cdiv(rows, ROWS) * tiles,)](
            x_RC, codes, scales, R, C, *x_RC.stride(), tiles * TILE, rows,
            LARGEST=torch.finfo(dtype).max, POWER_OF_TWO=power_of_two, ROWS=ROWS, TILE=TILE, num_warps=4,
        )  # fmt: skip
    return codes, scales


def empty_rows(x_RC: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for codes [R', C'] and scales [C' / 128, R'], both row-major."""
    rows, tiles = filled(x_RC.shape[0]), triton.cdiv(x_RC.shape[1], TILE)
    codes = x_RC.new_empty(rows, tiles * TILE, dtype=dtype)
    return codes, x_RC.new_empty(tiles, rows, dtype=torch.float32)


_in_graph = torch.library.custom_op("nanotrain_fp8::quantize_rows", _launch, mutates_args=())


@_in_graph.register_fake
def _(x_RC: torch.Tensor, dtype: torch.dtype, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_rows(x_RC, dtype)
