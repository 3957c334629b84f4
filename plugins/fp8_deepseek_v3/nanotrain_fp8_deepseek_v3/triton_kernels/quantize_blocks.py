"""Blocks of 128 x 128: weights, read once, stored as they are for y and transposed for dx."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanotrain_fp8_deepseek_v3.formats import E4M3, TILE
from nanotrain_fp8_deepseek_v3.triton_kernels.arithmetic import divided, largest_of_four, packed, scale_of


@dataclass(frozen=True, eq=False)
class Blocks:
    """Codes and scales of weights [E, N, K]; rows and columns are padded to whole blocks."""

    codes_ENK: torch.Tensor
    """[E, N', K'], row-major."""
    scales_Enk: torch.Tensor
    """[E, N' / 128, K' / 128], the last padded to a multiple of 4, as ``scaled_mm`` requires."""
    codes_EKN: torch.Tensor
    """[E, K', N'], row-major: the same codes."""
    scales_Ekn: torch.Tensor
    """[E, K' / 128, N' / 128], the last padded to a multiple of 4."""


@triton.jit  # type: ignore[untyped-decorator]
def round_blocks(  # type: ignore[no-untyped-def]
    w_ptr,
    codes_ptr,
    transposed_ptr,
    scales_ptr,
    scales_transposed_ptr,
    N,
    K,
    w_group,
    w_row,
    w_column,
    blocks_N,
    blocks_K,
    scales_row,
    scales_transposed_row,
    LARGEST: tl.constexpr,
    TILE: tl.constexpr,
):
    """Round one block, and store it twice."""
    bk = tl.program_id(0) % blocks_K
    bn = tl.program_id(0) // blocks_K % blocks_N
    e = (tl.program_id(0) // blocks_K // blocks_N).to(tl.int64)
    n, k = bn * TILE + 4 * tl.arange(0, TILE // 4), bk * TILE + tl.arange(0, TILE)
    k_ptr, inside = w_ptr + e * w_group + k[None, :].to(tl.int64) * w_column, (k < K)[None, :]
    w0, w1 = numbers(k_ptr, n, N, inside, w_row), numbers(k_ptr, n + 1, N, inside, w_row)
    w2, w3 = numbers(k_ptr, n + 2, N, inside, w_row), numbers(k_ptr, n + 3, N, inside, w_row)
    largest = largest_of_four(w0, w1, w2, w3)
    scale = scale_of(tl.max(tl.max(largest, 1), 0), LARGEST, False)
    w0, w1, w2, w3 = divided(w0, scale), divided(w1, scale), divided(w2, scale), divided(w3, scale)
    first, row = e * (blocks_N * TILE) * (blocks_K * TILE), blocks_K * TILE
    at = codes_ptr + first + n[:, None].to(tl.int64) * row + k[None, :]
    tl.store(at, w0.to(codes_ptr.dtype.element_ty))
    tl.store(at + row, w1.to(codes_ptr.dtype.element_ty))
    tl.store(at + 2 * row, w2.to(codes_ptr.dtype.element_ty))
    tl.store(at + 3 * row, w3.to(codes_ptr.dtype.element_ty))
    # Four rows' codes as one integer: bytes would be exchanged between threads one by one. They are rounded
    # again, from values that the compiler does not know to be the same: ptxas of CUDA 12.8 crashes on two
    # uses of one conversion.
    one = tl.where(N > 0, 1.0, 2.0)
    codes = packed(w0 * one, w1 * one, w2 * one, w3 * one, codes_ptr.dtype.element_ty)
    four = bn * (TILE // 4) + tl.arange(0, TILE // 4)
    transposed_at = first // 4 + k[:, None].to(tl.int64) * (blocks_N * TILE // 4) + four[None, :]
    tl.store(transposed_ptr + transposed_at, tl.trans(codes))
    tl.store(scales_ptr + (e * blocks_N + bn) * scales_row + bk, scale)
    tl.store(scales_transposed_ptr + (e * blocks_K + bk) * scales_transposed_row + bn, scale)


@triton.jit
def numbers(k_ptr, n, N, inside, w_row):  # type: ignore[no-untyped-def]
    """Return every fourth row of a block [32, 128], in float32; zeros beyond the end."""
    w_ptrs = k_ptr + n[:, None].to(tl.int64) * w_row
    return tl.load(w_ptrs, mask=(n < N)[:, None] & inside, other=0.0).to(tl.float32)


def quantize_blocks(weight: torch.Tensor) -> Blocks:
    """Round a weight [N, K], or stacked ones [E, N, K], with any strides."""
    w_ENK = weight.detach() if weight.dim() == 3 else weight.detach()[None]
    E, N, K = w_ENK.shape
    n, k = triton.cdiv(N, TILE), triton.cdiv(K, TILE)
    found = Blocks(
        w_ENK.new_empty(E, n * TILE, k * TILE, dtype=E4M3.dtype),
        empty_scales(w_ENK, E, n, k),
        w_ENK.new_empty(E, k * TILE, n * TILE, dtype=E4M3.dtype),
        empty_scales(w_ENK, E, k, n),
    )
    if w_ENK.numel():
        round_blocks[(E * n * k,)](
            w_ENK, found.codes_ENK, found.codes_EKN.view(torch.int32), found.scales_Enk, found.scales_Ekn,
            N, K, *w_ENK.stride(), n, k, found.scales_Enk.stride(1), found.scales_Ekn.stride(1),
            LARGEST=E4M3.largest, TILE=TILE, num_warps=8,
        )  # fmt: skip
    return found


def empty_scales(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return room for scales, with rows of a multiple of 16 bytes; zero where the kernel writes none."""
    *rows, blocks = shape
    filling = -blocks % 4
    make = like.new_zeros if filling else like.new_empty
    return make(*rows, blocks + filling, dtype=torch.float32)
