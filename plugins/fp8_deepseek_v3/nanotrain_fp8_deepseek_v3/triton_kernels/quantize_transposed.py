"""Tiles of 128 x 1, stored transposed: both operands of dW, in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanotrain_fp8_deepseek_v3.formats import E4M3, TILE, Format
from nanotrain_fp8_deepseek_v3.triton_kernels.arithmetic import divided, largest_of_four, packed, scale_of
from nanotrain_fp8_deepseek_v3.triton_kernels.layout import Groups, filled, group_of, rows_of

#: Columns per program: 128 bytes of bfloat16 in each of 128 rows.
COLUMNS = 64

#: Threads and registers, set by the compiler's instruction count per element. A load of 16 bytes is 8
#: elements but 16 codes, whose columns' scales each thread computes: fewer threads, more rows each.
OF_NUMBERS = {"num_warps": 4, "maxnreg": 128}
OF_CODES = {"num_warps": 2}

#: Triton's names of the formats.
NAMES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit  # type: ignore[untyped-decorator]
def round_columns(  # type: ignore[no-untyped-def]
    x_ptr,
    of_x_ptr,
    codes_ptr,
    scales_ptr,
    rows_ptr,
    tiles_ptr,
    R,
    C,
    E,
    x_row,
    x_column,
    of_x_row,
    of_x_tile,
    codes_column,
    scales_tile,
    DTYPE: tl.constexpr,
    CODED: tl.constexpr,
    SEARCHED: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Round 128 rows by ``COLUMNS`` of elements, or of codes with their scales, and store them transposed.

    Four rows' codes become one 32-bit integer before they are exchanged between threads: bytes would be
    exchanged one by one.

    ``SEARCHED`` 0: all rows are one group.
    """
    across = tl.cdiv(C, COLUMNS)
    tile, first = (tl.program_id(0) // across).to(tl.int64), tl.program_id(0) % across * COLUMNS
    c = first + tl.arange(0, COLUMNS)
    if SEARCHED:
        e = group_of(tile, tiles_ptr, E, SEARCHED)
        if e == E:
            return
        r, end = rows_of(tile, e, tiles_ptr, rows_ptr, TILE)
        begin = tl.min(r, 0)
    else:
        begin, end = tile * TILE, R
    of_x_at = (first // TILE).to(tl.int64) * of_x_tile
    c_ptr = x_ptr + c[None, :].to(tl.int64) * x_column
    inside = (c < C)[None, :]
    r = begin + 4 * tl.arange(0, TILE // 4)
    x0 = numbers(c_ptr, of_x_ptr, r, end, inside, x_row, of_x_row, of_x_at, CODED)
    x1 = numbers(c_ptr, of_x_ptr, r + 1, end, inside, x_row, of_x_row, of_x_at, CODED)
    x2 = numbers(c_ptr, of_x_ptr, r + 2, end, inside, x_row, of_x_row, of_x_at, CODED)
    x3 = numbers(c_ptr, of_x_ptr, r + 3, end, inside, x_row, of_x_row, of_x_at, CODED)
    largest = largest_of_four(x0, x1, x2, x3)
    scale = scale_of(tl.max(largest, 0), LARGEST, POWER_OF_TWO)
    by = scale[None, :]
    codes = packed(divided(x0, by), divided(x1, by), divided(x2, by), divided(x3, by), DTYPE)
    stored, p = c < scales_tile, tile * (TILE // 4) + tl.arange(0, TILE // 4)
    codes_ptrs = codes_ptr + c[:, None].to(tl.int64) * codes_column + p[None, :]
    tl.store(codes_ptrs, tl.trans(codes), mask=stored[:, None])
    tl.store(scales_ptr + tile * scales_tile + c, scale, mask=stored)


@triton.jit  # type: ignore[untyped-decorator]
def numbers(  # type: ignore[no-untyped-def]
    c_ptr, of_x_ptr, r, end, inside, x_row, of_x_row, of_x_at, CODED: tl.constexpr
):
    """Return every fourth row of a tile [32, COLUMNS], in float32; zeros beyond the end."""
    here = r < end
    x = tl.load(c_ptr + r[:, None] * x_row, mask=here[:, None] & inside, other=0.0).to(tl.float32)
    if CODED:
        of_x = tl.load(of_x_ptr + of_x_at + r * of_x_row, mask=here, other=0.0)
        x = x * (of_x + of_x * 0.0)[:, None]  # NaN for infinity, so that all of its tile is NaN
    return x


def quantize_transposed(
    x_RC: torch.Tensor,
    groups: Groups | None = None,
    format_: Format = E4M3,
    *,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [C', P] row-major and scales [C', P / 128] column-major: P rows, padded to whole tiles.

    Columns are padded to a multiple of 16. With groups, tiles begin anew in each, and of P,
    which is an upper bound, only the tiles that exist have been written.
    """
    return _transposed(x_RC, None, groups, format_, power_of_two=power_of_two)


def requantize_transposed(
    codes_RC: torch.Tensor, scales: torch.Tensor, groups: Groups | None = None, *, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same for codes and scales [R, c] of tiles of 1 x 128, rounding them again."""
    return _transposed(codes_RC, scales, groups, E4M3, power_of_two=power_of_two)


def _transposed(
    x_RC: torch.Tensor,
    of_x: torch.Tensor | None,
    groups: Groups | None,
    format_: Format,
    *,
    power_of_two: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    rounded = _in_graph if torch.compiler.is_compiling() else _launch
    rows, tiles = (None, None) if groups is None else (groups.rows, groups.tiles)
    codes, scales = rounded(x_RC, of_x, rows, tiles, format_.dtype, power_of_two)
    return codes, scales.T


def _launch(
    x_RC: torch.Tensor,
    of_x: torch.Tensor | None,
    rows: torch.Tensor | None,
    tiles: torch.Tensor | None,
    dtype: torch.dtype,
    power_of_two: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [C', P] and scales [P / 128, C'], both row-major; ``rows`` and ``tiles`` are of groups."""
    codes, scales = _empty(x_RC, rows, tiles, dtype)
    (R, C), (many, columns) = x_RC.shape, scales.shape
    groups = None if rows is None or tiles is None else Groups(rows, tiles)
    if codes.numel():
        round_columns[(many * triton.cdiv(C, COLUMNS),)](
            x_RC, of_x, codes.view(torch.int32), scales, rows, tiles,
            R, C, len(groups) if groups else 0, *x_RC.stride(), *((0, 0) if of_x is None else of_x.stride()),
            many * TILE // 4, columns, DTYPE=NAMES[dtype], CODED=of_x is not None,
            SEARCHED=groups.searched if groups else 0, LARGEST=torch.finfo(dtype).max,
            POWER_OF_TWO=power_of_two, COLUMNS=COLUMNS, TILE=TILE,
            **(OF_NUMBERS if of_x is None else OF_CODES),
        )  # fmt: skip
    return codes, scales


def _empty(
    x_RC: torch.Tensor, rows: torch.Tensor | None, tiles: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    R, columns = x_RC.shape[0], filled(x_RC.shape[1])
    groups = None if rows is None or tiles is None else Groups(rows, tiles)
    many = triton.cdiv(R, TILE) if groups is None else groups.most_tiles(R)
    codes = x_RC.new_empty(columns, many * TILE, dtype=dtype)
    return codes, x_RC.new_empty(many, columns, dtype=torch.float32)


_in_graph = torch.library.custom_op("nanotrain_fp8::quantize_transposed", _launch, mutates_args=())


@_in_graph.register_fake
def _(
    x_RC: torch.Tensor,
    of_x: torch.Tensor | None,
    rows: torch.Tensor | None,
    tiles: torch.Tensor | None,
    dtype: torch.dtype,
    power_of_two: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(x_RC, rows, tiles, dtype)
