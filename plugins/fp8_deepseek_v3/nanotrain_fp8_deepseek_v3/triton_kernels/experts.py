"""Grouped GEMMs of experts: all of them in one launch, whose programs find their rows on the device.

Sums of 128 products are computed by tensor cores, then multiplied by the scales and accumulated in float32,
as DeepSeek-V3 promotes them (arXiv 2412.19437, section 3.3.2). There are as many programs as the rows could
need at most; those without rows exit immediately.

They are limited by cache reads: with tiles of 128 x 128, four bytes per 128
multiplications. So a program computes 128 rows by 256 columns if there are enough of these, as two products
with the same left operand, one after the other: the unscaled sums of a product take as many
registers as the scaled ones, and 128 x 256 of both would take all registers of a multiprocessor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanotrain_core.api.torch import store_in_selective_checkpointing
from nanotrain_fp8_deepseek_v3.formats import TILE
from nanotrain_fp8_deepseek_v3.triton_kernels.layout import Groups, group_of, rows_of

#: As many programs as an H100 or H200 runs in two waves on 132 multiprocessors: with fewer, blocks are
#: narrow.
ENOUGH = 264


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
    M,
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
    TWICE: tl.constexpr,
    SEARCHED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Multiply 128 rows of a group by 128 or 256 of its weight. Neighbors share rows, then the weight."""
    blocks = tl.cdiv(N, TILE)
    across = tl.cdiv(blocks, 2) if TWICE else blocks
    tile, block = tl.program_id(0) // across, tl.program_id(0) % across
    e = group_of(tile, tiles_ptr, E, SEARCHED)
    if e == E:
        return
    r, end = rows_of(tile, e, tiles_ptr, rows_ptr, TILE)
    if TWICE:
        block *= 2
    begin, local = tl.min(r, 0), tl.arange(0, TILE)
    # Beyond the end of the group there are rows of another, which are read but not stored.
    rows = tl.minimum(local, (M - 1 - begin).to(tl.int32))
    a_at, b_at = rows[:, None] * a_row + local[None, :], local[:, None] * b_row + local[None, :]
    a_ptr += begin * a_row
    of_a_ptr += begin * of_a_row
    of_a_at = rows * of_a_row
    b_ptr += e.to(tl.int64) * b_group + block.to(tl.int64) * TILE * b_row
    of_b_ptr += e.to(tl.int64) * of_b_group + block * of_b_row
    # The second of two blocks may not exist; then the first is multiplied again, but not stored.
    other = tl.where(block + 1 < blocks, 1, 0)
    c_ptr, of_c_ptr = b_ptr + other * TILE * b_row, of_b_ptr + other * of_b_row
    first, second = tl.zeros((TILE, TILE), tl.float32), tl.zeros((TILE, TILE), tl.float32)
    a_ptrs, b_ptrs, c_ptrs = a_ptr + a_at, b_ptr + b_at, c_ptr + b_at
    for _ in range(K_TILES):
        of_a = tl.load(of_a_ptr + of_a_at)
        of_b, of_c = tl.load(of_b_ptr), tl.load(of_c_ptr)
        a = tl.load(a_ptrs)
        first += tl.dot(a, tl.trans(tl.load(b_ptrs))) * (of_a * of_b)[:, None]
        if TWICE:
            second += tl.dot(a, tl.trans(tl.load(c_ptrs))) * (of_a * of_c)[:, None]
            c_ptrs += TILE
        of_a_ptr += of_a_tile
        a_ptrs += TILE
        b_ptrs += TILE
        of_b_ptr += 1
        of_c_ptr += 1
    r, end = rows_of(tile, e, tiles_ptr, rows_ptr, TILE)  # recomputed: no registers hold them during the loop
    n = block * TILE + local
    inside = (r < end)[:, None]
    y_ptrs = y_ptr + r[:, None] * y_row + n[None, :]
    tl.store(y_ptrs, first.to(y_ptr.dtype.element_ty), mask=inside & (n[None, :] < N))
    if TWICE:
        tl.store(y_ptrs + TILE, second.to(y_ptr.dtype.element_ty), mask=inside & (n[None, :] + TILE < N))


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
        programs, twice = programs_of(groups.most_tiles(M), triton.cdiv(N, TILE))
        rows_times_blocks[(programs,)](
            a, of_a, b, of_b, y, groups.rows, groups.tiles, len(groups), M, N, a.shape[1] // TILE,
            a.stride(0), *of_a.stride(), *b.stride()[:2], *of_b.stride()[:2], y.stride(0),
            TWICE=twice, SEARCHED=groups.searched, TILE=TILE, num_warps=8, num_stages=4,
        )  # fmt: skip
    return y


_rows_in_graph = torch.library.custom_op("nanotrain_fp8::experts_rows", _launch_rows, mutates_args=())
store_in_selective_checkpointing("nanotrain_fp8::experts_rows")


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
    """Multiply a 128 x 128 block of one weight's gradient, over the tiles of its group."""
    across, down = tl.cdiv(K, TILE), tl.cdiv(N, TILE)
    e, local = (tl.program_id(0) // (across * down)).to(tl.int64), tl.arange(0, TILE)
    n, k = tl.program_id(0) // across % down * TILE + local, tl.program_id(0) % across * TILE + local
    begin, end = tl.load(tiles_ptr + e), tl.load(tiles_ptr + e + 1)
    # Missing rows of operands are replaced by others, and not stored.
    from_a, from_b = tl.minimum(n, N - 1), tl.minimum(k, K - 1)
    a_ptrs = a_ptr + begin * TILE + from_a[:, None].to(tl.int64) * a_row + local[None, :]
    b_ptrs = b_ptr + begin * TILE + from_b[:, None].to(tl.int64) * b_row + local[None, :]
    of_a_ptr += begin * of_a_tile
    of_b_ptr += begin * of_b_tile
    total = tl.zeros((TILE, TILE), tl.float32)
    for _ in range((end - begin).to(tl.int32)):
        of_a = tl.load(of_a_ptr + n, mask=n < N, other=0.0)
        of_b = tl.load(of_b_ptr + k, mask=k < K, other=0.0)
        total += tl.dot(tl.load(a_ptrs), tl.trans(tl.load(b_ptrs))) * of_a[:, None] * of_b[None, :]
        a_ptrs += TILE
        b_ptrs += TILE
        of_a_ptr += of_a_tile
        of_b_ptr += of_b_tile
    y_ptrs = y_ptr + (e * N + n[:, None]) * K + k[None, :]
    tl.store(y_ptrs, total, mask=(n[:, None] < N) & (k[None, :] < K))


def multiply_columns(
    left: tuple[torch.Tensor, torch.Tensor],
    right: tuple[torch.Tensor, torch.Tensor],
    groups: Groups,
    shape: tuple[int, int],
) -> torch.Tensor:
    """Return dW [E, N, K] in float32: for each group, the sum over its rows; zeros if it has none.

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


def programs_of(down: int, across: int) -> tuple[int, bool]:
    """Return the number of programs for blocks of 128 x 128, and whether each computes two neighbors."""
    wide = down * ((across + 1) // 2)
    return (wide, True) if across > 1 and wide >= ENOUGH else (down * across, False)
