"""The arithmetic of all kernels on a tile: its scale, and the quotients."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def magnitudes(x):  # type: ignore[no-untyped-def]
    """Return the bits of |x|, float32: ordered as the magnitudes are, with NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def largest_of_four(a, b, c, d):  # type: ignore[no-untyped-def]
    """Return the bits of the largest magnitude of four, elementwise."""
    return tl.maximum(tl.maximum(magnitudes(a), magnitudes(b)), tl.maximum(magnitudes(c), magnitudes(d)))


@triton.jit  # type: ignore[untyped-decorator]
def scale_of(largest_bits, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scales of tiles whose largest magnitudes have these bits.

    It divides by a constant: each thread computes those of all its tiles, and a division is twelve
    instructions. Values below the smallest scale, where remainders are not exact, do not matter.
    """
    amax = largest_bits.to(tl.float32, bitcast=True)
    scale = amax * (1.0 / LARGEST)
    scale = tl.fma(tl.fma(scale, -LARGEST, amax), 1.0 / LARGEST, scale)
    scale = tl.fma(tl.fma(scale, -LARGEST, amax), 1.0 / LARGEST, scale)
    scale = tl.where(amax < float("inf"), scale, amax)  # keeps NaN
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)  # keeps NaN
    if POWER_OF_TWO:
        bits = (scale.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000
        scale = tl.where(scale < float("inf"), bits.to(tl.float32, bitcast=True), scale)
    return scale


@triton.jit
def divided(x, scale):  # type: ignore[no-untyped-def]
    """Return x / scale, rounded as a division rounds, with one division for each scale.

    A product with the reciprocal is at most 1.5 units off. A correction by the exact remainder makes it
    faithful, a second one correctly rounded (Markstein, IBM J. Res. Dev. 34(1), 1990). With a
    division per element the compiled kernel of rows is two fifths longer, where it should be limited only by
    memory.

    Small scales and their elements are multiplied by 2^64, or the remainder would be subnormal.
    """
    up = tl.where(scale < 2.168404344971009e-19, 1.8446744073709552e19, 1.0)
    less = x * -up  # -x: so that elements are not negated one by one, and -0 is preserved
    scale = scale * up
    reciprocal = tl.div_rn(-1.0, scale)
    finite = tl.where(scale < float("inf"), scale, 0.0)  # by infinity: zeros, NaN for infinity
    reciprocal, finite = tl.broadcast_to(reciprocal, x.shape), tl.broadcast_to(finite, x.shape)
    q = less * reciprocal
    q = tl.fma(tl.fma(q, finite, less), reciprocal, q)
    return tl.fma(tl.fma(q, finite, less), reciprocal, q)


@triton.jit  # type: ignore[untyped-decorator]
def packed(a, b, c, d, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return four values rounded to eight bits as one of 32 bits, the first at the lowest address."""
    a = a.to(DTYPE).to(tl.uint8, bitcast=True).to(tl.int32)
    b = b.to(DTYPE).to(tl.uint8, bitcast=True).to(tl.int32)
    c = c.to(DTYPE).to(tl.uint8, bitcast=True).to(tl.int32)
    d = d.to(DTYPE).to(tl.uint8, bitcast=True).to(tl.int32)
    return a | (b << 8) | (c << 16) | (d << 24)
