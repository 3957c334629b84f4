"""Kernels of weights in NVFP4: of masters with residuals, and of storage. Imported only where Triton is.

Plain PyTorch takes about 250 passes over memory to store a master, and 10 to 30 to unpack or pack a weight:
here it is one kernel each. They have the values of :mod:`~nanotrain_fp4_master.lowbit` and
:mod:`~nanotrain_fp4_master.packing` in every bit, except that where the compiler contracts a product and a
sum, a weight about as far from two codes may get the other one.

Shapes: N blocks of a program, of B = 16 weights each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanotrain_fp4_master import noise, nvfp4

#: Blocks of a program.
BLOCKS = 64
B = tl.constexpr(nvfp4.BLOCK)
#: Units of the largest rounding error, the range of a residual, and the share of it that counts.
PARTS, REACH, SLACK = tl.constexpr(124.0), tl.constexpr(127.0), tl.constexpr(0.05)
LEAST, MOST = tl.constexpr(nvfp4.SCALES[0]), tl.constexpr(nvfp4.SCALES[1])
BIAS, NO_SCALE = tl.constexpr(nvfp4.BIAS), tl.constexpr(nvfp4.NAN)
LOW, HIGH = tl.constexpr(nvfp4.POWERS[0]), tl.constexpr(nvfp4.POWERS[1])
LARGEST_SCALE = tl.constexpr(nvfp4.LARGEST_SCALE)
GOLDEN, FIRST, SECOND = (tl.constexpr(each) for each in (noise.GOLDEN, noise.FIRST, noise.SECOND))


@triton.jit
def largest_of(x):  # type: ignore[no-untyped-def]
    """Return the largest magnitude of each block [N, 1], NaN if there is one."""
    broken = tl.max((x != x).to(tl.int32), 1)  # noqa: PLR0124
    return tl.where(broken > 0, float("nan"), tl.max(tl.abs(x), 1))[:, None]


@triton.jit
def whole(x):  # type: ignore[no-untyped-def]
    """Round numbers below 2^22 to whole ones, ties to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def to_bfloat16(x):  # type: ignore[no-untyped-def]
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def four_bits(x):  # type: ignore[no-untyped-def]
    """Round positive numbers to four significant bits. Subnormal ones have fewer: all are below any scale."""
    bits = x.to(tl.int32, bitcast=True)
    bits += 0x7FFFF + ((bits >> 20) & 1)
    return tl.where(x == x, (bits >> 20 << 20).to(tl.float32, bitcast=True), float("nan"))  # noqa: PLR0124


@triton.jit
def step(x):  # type: ignore[no-untyped-def]
    """Return the spacing of E2M1 numbers from a magnitude upwards."""
    limited = tl.minimum(tl.maximum(tl.abs(x), 1.0), 4.0)
    return (limited.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * 0.5


@triton.jit
def nearest(x):  # type: ignore[no-untyped-def]
    """Round to E2M1 numbers."""
    apart = step(x)
    rounded = whole(tl.minimum(tl.maximum(x, -8.0), 8.0) / apart) * apart  # `apart` is a power of two
    number = tl.minimum(tl.maximum(rounded, -6.0), 6.0).to(tl.int32, bitcast=True)
    signed = number | tl.where(x.to(tl.int32, bitcast=True) < 0, -(2**31), 0).to(tl.int32)  # of 0 as well
    return tl.where(x == x, signed.to(tl.float32, bitcast=True), float("nan"))  # noqa: PLR0124


@triton.jit
def sixth(x):  # type: ignore[no-untyped-def]
    return tl.div_rn(x, x * 0.0 + 6.0)


@triton.jit
def nonzero(scales):  # type: ignore[no-untyped-def]
    return tl.where(scales == 0, 1.0, scales)


@triton.jit
def units(rounded, scales):  # type: ignore[no-untyped-def]
    ratio = tl.div_rn(rounded, nonzero(scales) + rounded * 0.0)
    return to_bfloat16(step(ratio) / 2 * tl.div_rn(scales, scales * 0.0 + PARTS))


@triton.jit
def residual_of(wide, rounded, noise):  # type: ignore[no-untyped-def]
    scales = sixth(largest_of(rounded))
    unit, empty = units(rounded, scales), (scales == 0).to(tl.float32)
    return tl.floor(tl.div_rn(wide - rounded, unit + empty) + noise) * (1 - empty), unit


@triton.jit
def to_nearest(wide, tensor_scale):  # type: ignore[no-untyped-def]
    wanted = four_bits(sixth(largest_of(wide)))
    scales = tl.where(wanted < tensor_scale * LEAST, 0.0, wanted)
    scales = tl.where(wanted <= tensor_scale * MOST, scales, float("nan"))
    return to_bfloat16(nearest(tl.div_rn(wide, nonzero(scales) + wide * 0.0)) * scales)


@triton.jit
def scale_of_tensor(largest):  # type: ignore[no-untyped-def]
    """Return the power of two for weights up to ``largest``: see ``power_of_two``, also for 0."""
    finite = tl.where(largest < float("inf"), sixth(largest), 3.4028234663852886e38)
    bits = tl.div_rn(four_bits(finite), finite * 0.0 + MOST).to(tl.int32, bitcast=True)
    exponent = tl.where(largest == 0, HIGH, tl.minimum(tl.maximum((bits >> 23) - 126, LOW), HIGH))
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def uniform(elements, key):  # type: ignore[no-untyped-def]
    """Return the random number of each element."""
    z = elements * GOLDEN + key
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * FIRST
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * SECOND
    z = z ^ ((z >> 31) & 0x1FFFFFFFF)
    return ((z >> 48) & 0xFFFF).to(tl.float32) * 0.0000152587890625


@triton.jit  # type: ignore[untyped-decorator]
def at_of(N: tl.constexpr):  # type: ignore[no-untyped-def]
    blocks = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    return blocks[:, None] * B + tl.arange(0, B)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def load_residual(weight_ptr, residual_ptr, value_ptr, size, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = at_of(N)
    rounded = tl.load(weight_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + at, mask=at < size, other=0).to(tl.float32)
    unit = units(rounded, sixth(largest_of(rounded)))
    tl.store(value_ptr + at, rounded + residual * unit, mask=at < size)


@triton.jit(do_not_specialize=["first", "key"])  # type: ignore[untyped-decorator]
def store_residual(  # type: ignore[no-untyped-def]
    value_ptr, weight_ptr, residual_ptr, largest_ptr, size, first, key, N: tl.constexpr
):
    at = at_of(N)
    there = at < size
    tensor_scale = scale_of_tensor(tl.load(largest_ptr + tl.zeros((1, 1), tl.int32)))
    wide = tl.load(value_ptr + at, mask=there, other=0.0).to(tl.float32)
    old = tl.load(weight_ptr + at, mask=there, other=0.0).to(tl.float32)
    noise = tl.where(there, uniform(at + first.to(tl.int64), key.to(tl.int64)), 0.0)

    scales = sixth(largest_of(old))
    divisor = nonzero(scales)
    parts, unit = residual_of(wide, old, noise)
    near = old + (1 - SLACK) * parts * unit
    stays = to_bfloat16(nearest(tl.div_rn(near, divisor + near * 0.0)) * scales) == old
    moved = to_bfloat16(nearest(tl.div_rn(wide, divisor + wide * 0.0)) * scales)
    moved = tl.where(stays, old, moved)
    parts, unit = residual_of(wide, moved, noise)
    fit = tl.div_rn(largest_of(moved + parts * unit), divisor)
    has = (four_bits(scales) == scales) & (scales >= tensor_scale * LEAST)
    keeps = (largest_of(parts) <= REACH) & has & (fit > 5.5) & (fit < 6.5)
    rounded = tl.where(keeps, moved, to_nearest(wide, tensor_scale))
    parts, unit = residual_of(wide, rounded, noise)
    parts = tl.minimum(tl.maximum(parts, -REACH), REACH)
    tl.store(weight_ptr + at, rounded.to(tl.bfloat16), mask=there)
    tl.store(residual_ptr + at, parts.to(tl.int8), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def unpack_rows(rows_ptr, numbers_ptr, size, N: tl.constexpr, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the bfloat16 numbers of packed rows of 64 weights and W bytes."""
    at = at_of(N)
    row, column = at // 64, at % 64
    byte = tl.load(rows_ptr + row * W + column // 2, mask=at < size, other=0).to(tl.int32)
    code = (byte >> (column % 2 * 4).to(tl.int32)) & 15
    size_of = (code & 7).to(tl.float32)
    magnitude = tl.where(size_of < 4, size_of / 2, tl.where(size_of < 6, size_of - 2, size_of * 2 - 8))
    number = tl.where(code >= 8, magnitude * -1.0, magnitude)  # 0 has a sign
    stored = tl.load(rows_ptr + row * W + 32 + column // B, mask=at < size, other=0).to(tl.int32)
    bits = (((stored >> 3) - BIAS + 127) << 23) | ((stored & 7) << 20)
    scale = tl.where(stored == 0, 0.0, bits.to(tl.float32, bitcast=True))
    scale = tl.where(stored == NO_SCALE, float("nan"), scale)
    tl.store(numbers_ptr + at, (number * scale).to(tl.bfloat16), mask=at < size)


@triton.jit  # type: ignore[untyped-decorator]
def pack_rows(numbers_ptr, rows_ptr, size, N: tl.constexpr, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write packed rows of bfloat16 numbers; what is left of the last row is 0."""
    at = at_of(N)
    blocks = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    there = blocks < tl.cdiv(size, 64) * 4
    numbers = tl.load(numbers_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    scales = sixth(largest_of(numbers))
    ratio = tl.div_rn(numbers, nonzero(scales) + numbers * 0.0)
    ratio = tl.where(ratio == ratio, ratio, 0.0)  # noqa: PLR0124
    magnitude = tl.abs(ratio)
    code = tl.where(magnitude < 2, magnitude * 2, tl.where(magnitude < 4, magnitude + 2, magnitude / 2 + 4))
    code = code.to(tl.int32) | tl.where(ratio.to(tl.int32, bitcast=True) < 0, 8, 0)
    low, high = tl.split(tl.reshape(code, (N, B // 2, 2)))
    begin = rows_ptr + (blocks // 4) * W
    bytes_at = begin[:, None] + (blocks % 4)[:, None] * (B // 2) + tl.arange(0, B // 2)[None, :]
    tl.store(bytes_at, (low | (high << 4)).to(tl.uint8), mask=there[:, None])
    scale = tl.max(scales, 1)
    bits = scale.to(tl.int32, bitcast=True)
    stored = (((bits >> 23) - 127 + BIAS) << 3) | ((bits >> 20) & 7)
    stored = tl.where(scale == 0, 0, stored)
    stored = tl.where(scale <= LARGEST_SCALE, stored, NO_SCALE)
    tl.store(begin + 32 + blocks % 4, stored.to(tl.uint8), mask=there)


def unpack(rows_UW: torch.Tensor) -> torch.Tensor:
    """Return the bfloat16 numbers of packed rows, flat."""
    numbers = rows_UW.new_empty(len(rows_UW) * 64, dtype=torch.bfloat16)
    size, grid = numbers.numel(), (triton.cdiv(numbers.numel(), BLOCKS * B.value),)
    if size:
        unpack_rows[grid](rows_UW, numbers, size, N=BLOCKS, W=rows_UW.shape[1])
    return numbers


def pack(numbers_n: torch.Tensor, rows_UW: torch.Tensor) -> None:
    """Write flat numbers, which are rounded, into rows."""
    grid = (triton.cdiv(len(rows_UW) * 64, BLOCKS * B.value),)
    if len(rows_UW):
        pack_rows[grid](numbers_n, rows_UW, numbers_n.numel(), N=BLOCKS, W=rows_UW.shape[1])


def load(weight_n: torch.Tensor, residual_n: torch.Tensor, value_n: torch.Tensor) -> None:
    """Write the master of flat bfloat16 weights and residuals into ``value_n``."""
    size = weight_n.numel()
    load_residual[(triton.cdiv(size, BLOCKS * B.value),)](weight_n, residual_n, value_n, size, N=BLOCKS)


def store(
    value_n: torch.Tensor,
    weight_n: torch.Tensor,
    residual_n: torch.Tensor,
    largest: torch.Tensor,
    first: int,
    key: int,
) -> None:
    """Round flat masters ``value_n`` into bfloat16 weights, which hold the previous ones, and residuals.

    Args:
        largest: the largest magnitude of the tensor's masters, a float32 scalar on the device.
        first: the index of the first weight in the whole tensor.
        key: of this step's random numbers.
    """
    size, grid = value_n.numel(), (triton.cdiv(value_n.numel(), BLOCKS * B.value),)
    store_residual[grid](value_n, weight_n, residual_n, largest, size, first, key, N=BLOCKS)
