"""Rounding to tiles in one pass over memory, as a Triton kernel. **Not yet run on a GPU.**

The same arithmetic as :mod:`~nanotrain_fp8_deepseek_v3.formats`, division and NaN included: codes and
scales are to be equal bit for bit. Imported only where Triton is.

Shapes: R rows, C columns, tiles of 128 columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanotrain_fp8_deepseek_v3.formats import E4M3, SMALLEST_SCALE, TILE, Format

#: Rows that one program rounds.
ROWS = 32


@triton.jit  # type: ignore[untyped-decorator]
def _round_tiles(  # type: ignore[no-untyped-def]
    x_ptr,
    codes_ptr,
    scales_ptr,
    R,
    C,
    x_row,
    x_column,
    codes_row,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    E5M2: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    tile = tl.program_id(1)
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    c = tile * TILE + tl.arange(0, TILE)
    inside = (r[:, None] < R) & (c[None, :] < C)
    x = tl.load(x_ptr + r[:, None] * x_row + c[None, :] * x_column, mask=inside, other=0.0).to(tl.float32)
    is_nan = tl.max((x != x).to(tl.int32), 1) > 0  # noqa: PLR0124 (NaN; a maximum passes over it)
    amax = tl.max(tl.abs(x), 1)
    scale = tl.maximum(tl.div_rn(amax, LARGEST), SMALLEST)
    if POWER_OF_TWO:
        bits = (scale.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000
        scale = tl.where(scale < float("inf"), bits.to(tl.float32, bitcast=True), scale)
    scale = tl.where(is_nan, float("nan"), scale)
    quotient = tl.div_rn(x, tl.broadcast_to(scale[:, None], (ROWS, TILE)))
    codes = quotient.to(tl.float8e5) if E5M2 else quotient.to(tl.float8e4nv)
    tl.store(codes_ptr + r[:, None] * codes_row + c[None, :], codes, mask=r[:, None] < R)
    tl.store(scales_ptr + tile * R + r, scale, mask=r < R)


def quantise_tiles(
    x_RC: torch.Tensor, format_: Format = E4M3, *, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of ``x``, which may be a transposed view: it is read as it lies."""
    R, C = x_RC.shape
    tiles = -(-C // TILE)
    codes = torch.empty(R, tiles * TILE, dtype=format_.dtype, device=x_RC.device)
    scales = torch.empty(tiles, R, dtype=torch.float32, device=x_RC.device)
    if R:
        _round_tiles[(triton.cdiv(R, ROWS), tiles)](
            x_RC,
            codes,
            scales,
            R,
            C,
            x_RC.stride(0),
            x_RC.stride(1),
            codes.stride(0),
            LARGEST=format_.largest,
            SMALLEST=SMALLEST_SCALE,
            POWER_OF_TWO=power_of_two,
            E5M2=format_ is not E4M3,
            ROWS=ROWS,
            TILE=TILE,
        )
    return codes, scales.T
