"""SwiGLU and the rounding around it, in one pass over memory each way.

Forward: gate and up are read once; their codes, for the backward pass, and those of h = silu(gate) up, which
the next layer multiplies, are written. Backward: the same h is recomputed from the codes of gate and up,
and if the gradient of h is given, so are the gradients of gate and up. h itself is written only on request.

silu(gate) is rounded to the dtype of gate, then the product, as the two operations of
:func:`nanotrain_core.models.ops.swiglu` round, and h is quantized from there: codes and scales are those that
:func:`~nanotrain_fp8_deepseek_v3.triton_kernels.quantize_rows.quantize_rows` makes of it, bit for bit. The
exponential is the device's fast one, whose error is far below the rounding of bfloat16: a few h in ten
thousand may differ from torch's in their last bit.

Shapes: M rows, F columns, both padded in codes; f tiles along F.

Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanotrain_fp8_deepseek_v3.formats import E4M3, TILE
from nanotrain_fp8_deepseek_v3.triton_kernels.quantize_rows import empty_rows, store_rounded

Tensor = torch.Tensor

#: Codes [M', F'] row-major, and scales [M', f] column-major.
Pair = tuple[Tensor, Tensor]

#: Rows per program: a thread holds 16 elements each of gate, up and h; or 32 of the latter, made of codes.
ROWS, ROWS_OF_CODES = 16, 32


class Forward(NamedTuple):
    """What the forward pass makes of gate and up [M, F]."""

    gate: Pair
    up: Pair
    h: Pair
    whole: Tensor | None
    """h [M, F] itself, if requested."""


class Backward(NamedTuple):
    """What the backward pass makes of the codes of gate and up."""

    h: Pair
    d_gate: Tensor | None
    """[M, F], if the gradient of h was given; and so is ``d_up``."""
    d_up: Tensor | None
    whole: Tensor | None
    """h [M, F] itself, if requested."""


@triton.jit  # type: ignore[untyped-decorator]
def silu_of(gate, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return sigmoid(gate), and silu(gate) rounded to ``DTYPE``, both as float32."""
    below = 1.0 + tl.exp2(gate * -1.4426950408889634)  # e^-gate; one that is flushed to zero adds nothing
    return 1.0 / below, (gate / below).to(DTYPE).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def round_swiglu(  # type: ignore[no-untyped-def]
    gate_ptr,
    up_ptr,
    codes_gate_ptr,
    scales_gate_ptr,
    codes_up_ptr,
    scales_up_ptr,
    codes_ptr,
    scales_ptr,
    whole_ptr,
    M,
    F,
    gate_row,
    gate_column,
    up_row,
    up_column,
    codes_row,
    scales_tile,
    DTYPE: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Round ``ROWS`` tiles of gate, of up and of h. ``POWER_OF_TWO``: the scales of h are."""
    tiles = codes_row // TILE
    tile = tl.program_id(0) % tiles
    m = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    f = tile * TILE + tl.arange(0, TILE)
    inside, column = (m[:, None] < M) & (f[None, :] < F), f[None, :].to(tl.int64)
    gate_ptrs, up_ptrs = gate_ptr + m[:, None] * gate_row, up_ptr + m[:, None] * up_row
    gate = tl.load(gate_ptrs + column * gate_column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptrs + column * up_column, mask=inside, other=0.0).to(tl.float32)
    store_rounded(gate, codes_gate_ptr, scales_gate_ptr, m, f, tile, codes_row, scales_tile, LARGEST, False)
    store_rounded(up, codes_up_ptr, scales_up_ptr, m, f, tile, codes_row, scales_tile, LARGEST, False)
    _, silu = silu_of(gate, DTYPE)
    h = (silu * up).to(DTYPE)
    if whole_ptr is not None:
        tl.store(whole_ptr + m[:, None] * F + f[None, :], h, mask=inside)
    store_rounded(
        h.to(tl.float32), codes_ptr, scales_ptr, m, f, tile, codes_row, scales_tile, LARGEST, POWER_OF_TWO
    )


@triton.jit  # type: ignore[untyped-decorator]
def round_recomputed_swiglu(  # type: ignore[no-untyped-def]
    gate_ptr,
    of_gate_ptr,
    up_ptr,
    of_up_ptr,
    d_h_ptr,
    d_gate_ptr,
    d_up_ptr,
    codes_ptr,
    scales_ptr,
    whole_ptr,
    M,
    F,
    gate_row,
    of_gate_row,
    of_gate_tile,
    up_row,
    of_up_row,
    of_up_tile,
    d_h_row,
    d_h_column,
    codes_row,
    scales_tile,
    DTYPE: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Round ``ROWS`` tiles of h, from codes of gate and up; with ``d_h_ptr``, store both gradients."""
    tiles = codes_row // TILE
    tile = tl.program_id(0) % tiles
    m = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    f = tile * TILE + tl.arange(0, TILE)
    here, inside = m < M, (m[:, None] < M) & (f[None, :] < F)
    at = tile.to(tl.int64)
    gate = numbers(
        gate_ptr, of_gate_ptr + at * of_gate_tile, m, f, here, inside, gate_row, of_gate_row, DTYPE
    )
    up = numbers(up_ptr, of_up_ptr + at * of_up_tile, m, f, here, inside, up_row, of_up_row, DTYPE)
    sigmoid, silu = silu_of(gate, DTYPE)
    h = (silu * up).to(DTYPE)
    if d_h_ptr is not None:
        d_h_ptrs = d_h_ptr + m[:, None] * d_h_row + f[None, :].to(tl.int64) * d_h_column
        d_h = tl.load(d_h_ptrs, mask=inside, other=0.0).to(tl.float32)
        d_silu = (d_h * up).to(DTYPE).to(tl.float32)
        d_gate = d_silu * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        stored = m[:, None] * F + f[None, :]
        tl.store(d_gate_ptr + stored, d_gate.to(DTYPE), mask=inside)
        tl.store(d_up_ptr + stored, (d_h * silu).to(DTYPE), mask=inside)
    if whole_ptr is not None:
        tl.store(whole_ptr + m[:, None] * F + f[None, :], h, mask=inside)
    store_rounded(
        h.to(tl.float32), codes_ptr, scales_ptr, m, f, tile, codes_row, scales_tile, LARGEST, POWER_OF_TWO
    )


@triton.jit  # type: ignore[untyped-decorator]
def numbers(  # type: ignore[no-untyped-def]
    codes_ptr, of_codes_ptr, m, f, here, inside, codes_row, of_codes_row, DTYPE: tl.constexpr
):
    """Return the values [ROWS, 128] of codes and scales, rounded to ``DTYPE``, as float32."""
    codes = tl.load(codes_ptr + m[:, None] * codes_row + f[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(of_codes_ptr + m * of_codes_row, mask=here, other=0.0)
    values = codes * (scale + scale * 0.0)[:, None]  # NaN for infinity, so that all of its tile is NaN
    return values.to(DTYPE).to(tl.float32)


#: Triton's names of the dtypes.
NAMES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def quantize_swiglu(
    gate_MF: Tensor, up_MF: Tensor, *, power_of_two: bool = False, whole: bool = False
) -> Forward:
    """Return codes and scales of gate, of up and of silu(gate) up. Both may have any strides.

    Args:
        gate_MF: in bfloat16, float16 or float32.
        up_MF: of the same dtype.
        power_of_two: use scales for h that are powers of two.
        whole: return h as well; not in a compiled graph, where torch's own h is free if nothing reads it.
    """
    if torch.compiler.is_compiling():
        return _forward(_forward_in_graph(gate_MF, up_MF, power_of_two), None)
    h = gate_MF.new_empty(gate_MF.shape) if whole else None
    return _forward(_launch_forward(gate_MF, up_MF, power_of_two, h), h)


Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _forward(made: Six, whole: Tensor | None) -> Forward:
    gate, of_gate, up, of_up, h, of_h = made
    return Forward((gate, of_gate.T), (up, of_up.T), (h, of_h.T), whole)


def _launch_forward(gate: Tensor, up: Tensor, power_of_two: bool, whole: Tensor | None = None) -> Six:
    """Return codes and scales of gate, up and h, all row-major."""
    made = _empty_forward(gate, up, power_of_two)
    (M, F), (tiles, rows) = gate.shape, made[1].shape
    if made[0].numel():
        round_swiglu[(triton.cdiv(rows, ROWS) * tiles,)](
            gate, up, *made, whole, M, F, *gate.stride(), *up.stride(), tiles * TILE, rows,
            DTYPE=NAMES[gate.dtype], LARGEST=E4M3.largest, POWER_OF_TWO=power_of_two, ROWS=ROWS, TILE=TILE,
            num_warps=4,
        )  # fmt: skip
    return made


def _empty_forward(gate: Tensor, up: Tensor, power_of_two: bool) -> Six:
    return *empty_rows(gate, E4M3.dtype), *empty_rows(gate, E4M3.dtype), *empty_rows(gate, E4M3.dtype)


@torch.library.custom_op("nanotrain_fp8::quantize_swiglu", mutates_args=())
def _forward_in_graph(
    gate: Tensor, up: Tensor, power_of_two: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _launch_forward(gate, up, power_of_two)


_forward_in_graph.register_fake(_empty_forward)


def requantize_swiglu(
    gate: Pair,
    up: Pair,
    dtype: torch.dtype,
    d_h_MF: Tensor | None = None,
    *,
    power_of_two: bool = False,
    whole: bool = False,
) -> Backward:
    """Return codes and scales of silu(gate) up, and if ``d_h`` is given, the gradients of gate and up.

    Args:
        gate: codes [M, F] and scales [M, f] of it, without padding.
        up: the same.
        dtype: what gate and up were; the result is that of this dtype, and gradients are of it.
        d_h_MF: the gradient of h.
        power_of_two: use scales for h that are powers of two.
        whole: return h as well; not in a compiled graph.
    """
    if not torch.compiler.is_compiling():
        h = gate[0].new_empty(gate[0].shape, dtype=dtype) if whole else None
        return _backward(_launch_backward(*gate, *up, d_h_MF, dtype, power_of_two, h), h)
    return _backward(_backward_in_graph(*gate, *up, d_h_MF, dtype, power_of_two), None)


def _backward(made: list[Tensor], whole: Tensor | None) -> Backward:
    codes, scales, *gradients = made
    d_gate, d_up = gradients or (None, None)
    return Backward((codes, scales.T), d_gate, d_up, whole)


def _launch_backward(
    gate: Tensor,
    of_gate: Tensor,
    up: Tensor,
    of_up: Tensor,
    d_h: Tensor | None,
    dtype: torch.dtype,
    power_of_two: bool,
    whole: Tensor | None = None,
) -> list[Tensor]:
    """Return codes and scales of h, row-major, and with ``d_h`` both gradients."""
    made = _empty_backward(gate, of_gate, up, of_up, d_h, dtype, power_of_two)
    (M, F), (tiles, rows) = gate.shape, made[1].shape
    codes, scales, *gradients = made
    assert gate.stride(1) == up.stride(1) == 1
    together = ROWS_OF_CODES if d_h is None else ROWS
    if codes.numel():
        round_recomputed_swiglu[(triton.cdiv(rows, together) * tiles,)](
            gate, of_gate, up, of_up, d_h, *(gradients or (None, None)), codes, scales, whole, M, F,
            gate.stride(0), *of_gate.stride(), up.stride(0), *of_up.stride(),
            *((0, 0) if d_h is None else d_h.stride()), tiles * TILE, rows,
            DTYPE=NAMES[dtype], LARGEST=E4M3.largest, POWER_OF_TWO=power_of_two, ROWS=together, TILE=TILE,
            num_warps=4,
        )  # fmt: skip
    return made


def _empty_backward(
    gate: Tensor,
    of_gate: Tensor,
    up: Tensor,
    of_up: Tensor,
    d_h: Tensor | None,
    dtype: torch.dtype,
    power_of_two: bool,
) -> list[Tensor]:
    gradients = [] if d_h is None else [gate.new_empty(gate.shape, dtype=dtype) for _ in range(2)]
    return [*empty_rows(gate, E4M3.dtype), *gradients]


@torch.library.custom_op("nanotrain_fp8::requantize_swiglu", mutates_args=())
def _backward_in_graph(
    gate: Tensor,
    of_gate: Tensor,
    up: Tensor,
    of_up: Tensor,
    d_h: Tensor | None,
    dtype: torch.dtype,
    power_of_two: bool,
) -> list[Tensor]:
    return _launch_backward(gate, of_gate, up, of_up, d_h, dtype, power_of_two)


_backward_in_graph.register_fake(_empty_backward)
