"""Grouped GEMMs of experts: all of them in one launch, whose programs find their rows on the device.

Sums of 128 products are made by tensor cores, then multiplied by the scales and added up in float32, as
DeepSeek-V3 promotes them (arXiv 2412.19437, section 3.3.2). There are as many programs as the rows could
need at most; those without rows end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanotrain_fp8_deepseek_v3.formats import TILE
from nanotrain_fp8_deepseek_v3.triton_kernels.layout import Groups, group_of, rows_of


@triton.jit  # type: ignore[untyped-decorator]
def rows_times_blocks(  # type: ignore[no-untyped-def]
    a_ptr,
    of_a_ptr,
    b_ptr,
    of_b_ptr,
    y_ptr,
    rows_ptr,
    tiles_ptr,
    E,
    N,
    K_TILES,
    a_row,
    of_a_row,
    of_a_tile,
    b_group,
    b_row,
    of_b_group,
    of_b_row,
    y_row,
    SEARCHED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Multiply 128 rows of a group by 128 rows of its weight. Neighbours share the rows, then the weight."""
    across = tl.cdiv(N, TILE)
    tile, block = tl.program_id(0) // across, tl.program_id(0) % across
    e = group_of(tile, tiles_ptr, E, SEARCHED)
    if e == E:
        return
    r, end = rows_of(tile, e, tiles_ptr, rows_ptr, TILE)
    n, k = block * TILE + tl.arange(0, TILE), tl.arange(0, TILE)
    inside, e = r < end, e.to(tl.int64)
    a_ptrs = a_ptr + r[:, None] * a_row + k[None, :]
    b_ptrs = b_ptr + e * b_group + n[:, None].to(tl.int64) * b_row + k[None, :]
    of_a_ptrs = of_a_ptr + r * of_a_row
    of_b_ptrs = of_b_ptr + e * of_b_group + block * of_b_row
    total = tl.zeros((TILE, TILE), tl.float32)
    for _ in range(K_TILES):
        a = tl.load(a_ptrs, mask=inside[:, None], other=0.0)
        b = tl.load(b_ptrs)
        scale = tl.load(of_a_ptrs, mask=inside, other=0.0) * tl.load(of_b_ptrs)
        total += tl.dot(a, tl.trans(b)) * scale[:, None]
        a_ptrs += TILE
        b_ptrs += TILE
        of_a_ptrs += of_a_tile
        of_b_ptrs += 1
    y_ptrs = y_ptr + r[:, None] * y_row + n[None, :]
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=inside[:, None] & (n[None, :] < N))


def multiply_rows(
    left: tuple[torch.Tensor, torch.Tensor],
    right: tuple[torch.Tensor, torch.Tensor],
    groups: Groups,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return y [M, N]: the rows of each group times its own weight, transposed.

    Args:
        left: codes [M', K'] by rows, scales [M', K' / 128] of tiles of 1 x 128.
        right: codes [E, N', K'] by rows, scales [E, N' / 128, K' / 128] of blocks.
        groups: of the M rows.
        shape: (M, N).
        dtype: of y.
    """
    multiplied = _rows_in_graph if torch.compiler.is_compiling() else _launch_rows
    y: torch.Tensor = multiplied(*left, *right, groups.rows, groups.tiles, shape[0], shape[1], dtype)
    return y


def _launch_rows(
    a: torch.Tensor,
    of_a: torch.Tensor,
    b: torch.Tensor,
    of_b: torch.Tensor,
    rows: torch.Tensor,
    tiles: torch.Tensor,
    M: int,
    N: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    groups, y = Groups(rows, tiles), of_a.new_empty(M, N, dtype=dtype)
    if y.numel():
        rows_times_blocks[(groups.most_tiles(M) * triton.cdiv(N, TILE),)](
            a, of_a, b, of_b, y, groups.rows, groups.tiles, len(groups), N, a.shape[1] // TILE,
            a.stride(0), *of_a.stride(), *b.stride()[:2], *of_b.stride()[:2], y.stride(0),
            SEARCHED=groups.searched, TILE=TILE, num_warps=8, num_stages=4,
        )  # fmt: skip
    return y


_rows_in_graph = torch.library.custom_op("nanotrain_fp8::experts_rows", _launch_rows, mutates_args=())


@_rows_in_graph.register_fake
def _(
    a: torch.Tensor,
    of_a: torch.Tensor,
    b: torch.Tensor,
    of_b: torch.Tensor,
    rows: torch.Tensor,
    tiles: torch.Tensor,
    M: int,
    N: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    return of_a.new_empty(M, N, dtype=dtype)


@triton.jit  # type: ignore[untyped-decorator]
def columns_times_columns(  # type: ignore[no-untyped-def]
    a_ptr,
    of_a_ptr,
    b_ptr,
    of_b_ptr,
    y_ptr,
    tiles_ptr,
    N,
    K,
    a_row,
    of_a_tile,
    b_row,
    of_b_tile,
    TILE: tl.constexpr,
):
    """Multiply 128 x 128 numbers of one weight's gradient, over the tiles of its group."""
    across = tl.cdiv(K, TILE)
    e = (tl.program_id(0) // (across * tl.cdiv(N, TILE))).to(tl.int64)
    n = tl.program_id(0) // across % tl.cdiv(N, TILE) * TILE + tl.arange(0, TILE)
    k = tl.program_id(0) % across * TILE + tl.arange(0, TILE)
    first, last = tl.load(tiles_ptr + e), tl.load(tiles_ptr + e + 1)
    p = first * TILE + tl.arange(0, TILE)
    a_ptrs = a_ptr + n[:, None].to(tl.int64) * a_row + p[None, :]
    b_ptrs = b_ptr + k[:, None].to(tl.int64) * b_row + p[None, :]
    of_a_ptrs, of_b_ptrs = of_a_ptr + first * of_a_tile + n, of_b_ptr + first * of_b_tile + k
    total = tl.zeros((TILE, TILE), tl.float32)
    for _ in range((last - first).to(tl.int32)):
        a = tl.load(a_ptrs, mask=(n < N)[:, None], other=0.0)
        b = tl.load(b_ptrs, mask=(k < K)[:, None], other=0.0)
        of_a = tl.load(of_a_ptrs, mask=n < N, other=0.0)
        of_b = tl.load(of_b_ptrs, mask=k < K, other=0.0)
        total += tl.dot(a, tl.trans(b)) * of_a[:, None] * of_b[None, :]
        a_ptrs += TILE
        b_ptrs += TILE
        of_a_ptrs += of_a_tile
        of_b_ptrs += of_b_tile
    y_ptrs = y_ptr + (e * N + n[:, None]) * K + k[None, :]
    tl.store(y_ptrs, total, mask=(n[:, None] < N) & (k[None, :] < K))


def multiply_columns(
    left: tuple[torch.Tensor, torch.Tensor],
    right: tuple[torch.Tensor, torch.Tensor],
    groups: Groups,
    shape: tuple[int, int],
) -> torch.Tensor:
    """Return dW [E, N, K] in float32: of each group, the sum over its rows; zeros where it has none.

    Args:
        left: codes [N', P] by rows, scales [N', P / 128] of dy, transposed.
        right: codes [K', P] by rows, scales [K', P / 128] of x, transposed.
        groups: whose tiles those of P are.
        shape: (N, K).
    """
    multiplied = _columns_in_graph if torch.compiler.is_compiling() else _launch_columns
    y: torch.Tensor = multiplied(*left, *right, groups.tiles, *shape)
    return y


def _launch_columns(
    a: torch.Tensor,
    of_a: torch.Tensor,
    b: torch.Tensor,
    of_b: torch.Tensor,
    tiles: torch.Tensor,
    N: int,
    K: int,
) -> torch.Tensor:
    E = len(tiles) - 1
    y = of_a.new_empty(E, N, K, dtype=torch.float32)
    if y.numel():
        columns_times_columns[(E * triton.cdiv(N, TILE) * triton.cdiv(K, TILE),)](
            a, of_a, b, of_b, y, tiles, N, K, a.stride(0), of_a.stride(1), b.stride(0), of_b.stride(1),
            TILE=TILE, num_warps=8, num_stages=4,
        )  # fmt: skip
    return y


_columns_in_graph = torch.library.custom_op(
    "nanotrain_fp8::experts_columns", _launch_columns, mutates_args=()
)


@_columns_in_graph.register_fake
def _(
    a: torch.Tensor,
    of_a: torch.Tensor,
    b: torch.Tensor,
    of_b: torch.Tensor,
    tiles: torch.Tensor,
    N: int,
    K: int,
) -> torch.Tensor:
    return of_a.new_empty(tiles.shape[0] - 1, N, K, dtype=torch.float32)
