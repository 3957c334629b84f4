"""Rounding to E2M1: to nearest, and stochastically with noise that is a hash of the block itself.

Stochastic rounding takes the next number away from zero with a probability equal to the distance from the
one towards zero, in units of their distance: the mean over the noise is the number itself. The noise has no
state. It is a hash of the sixteen elements of the block, as bfloat16 and negligible ones as 0, and of the
position of the element::

    h   = mix(sum of bits(x_j) * C_j)        u_i = mix(h + i * GOLDEN) / 2^32, in [0, 1), 24 bits of it

so that a block is rounded alike on every layout, when it is recomputed, in a W pass, in a compiled graph, in
a CUDA graph and after a resume, in whatever order blocks are rounded. Different blocks have independent
noise; equal ones, of equal bits in bfloat16, are rounded alike. Errors are then zero in the mean over the
blocks of a training, which all differ, not over repetitions of one block. What is hashed is the block before
the Hadamard transform, whose sums another device might round otherwise.

All is in unsigned 32-bit arithmetic: a kernel needs 16 multiplications and 16 additions for a block, and two
more multiplications for an element.

Source: ``mix`` is the finalizer of MurmurHash3 (Appleby, public domain).
"""

from __future__ import annotations

import torch

from nanotrain_fp8_deepseek_v3.formats import EXPONENT
from nanotrain_fp8_deepseek_v3.nvfp4.constants import constant

#: Multipliers of the finalizer, and the odd number next to 2^32 over the golden ratio.
FIRST, SECOND, GOLDEN = 0x85EBCA6B, 0xC2B2AE35, 0x9E3779B9
#: What is this much smaller than the largest of its block is hashed as 0, as are zeros with a sign. It is 0
#: nearly always once rounded, and may be what a sum that cancels leaves, or a row that a rank's tensor scale
#: makes another: neither shall change the noise of fifteen others.
NEGLIGIBLE = 2.0**-8
#: The noise of all runs.
SEED = 0x4E564650


def _signed(number: int) -> int:
    """Return a number modulo 2^32 as int32 has it."""
    return (number + 2**31) % 2**32 - 2**31


def _mixed(number: int) -> int:
    """Return :func:`mix` of a Python number."""
    number = (number ^ number >> 16) * FIRST % 2**32
    number = (number ^ number >> 13) * SECOND % 2**32
    return number ^ number >> 16


#: C_j: odd numbers, one for each position.
FACTORS = tuple(_signed(_mixed(SEED + position) | 1) for position in range(16))
#: i * GOLDEN, for each position.
STEPS = tuple(_signed(position * GOLDEN) for position in range(16))


def mix(z: torch.Tensor) -> torch.Tensor:
    """Scramble 32-bit numbers, int32, in place, each into another one."""
    for shift, factor in ((16, FIRST), (13, SECOND)):
        z.bitwise_xor_((z >> shift).bitwise_and_(2 ** (32 - shift) - 1)).mul_(_signed(factor))
    return z.bitwise_xor_((z >> 16).bitwise_and_(0xFFFF))


def noise_of(blocks: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a number in [0, 1) for each element of float32 blocks, which lie along ``dim``: 16 elements."""
    shape = [1] * blocks.dim()
    shape[dim] = 16
    factors, steps = (constant(each, blocks.device).view(shape) for each in (FACTORS, STEPS))
    bits = blocks.bfloat16().view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
    magnitude = blocks.abs()
    bits.masked_fill_(magnitude <= magnitude.amax(dim, keepdim=True).mul_(NEGLIGIBLE), 0)
    hashed = mix(bits.mul_(factors).sum(dim, keepdim=True, dtype=torch.int32))
    return mix(hashed + steps).bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).float().mul_(2.0**-24)


def spacing(ratio: torch.Tensor) -> torch.Tensor:
    """Return the distance from E2M1 numbers to the next: 0.5; 1 from 2 on; 2 from 4 on. New memory.

    It is half of the power of two in float32's exponent, of 1 at least.
    """
    return ratio.view(torch.int32).bitwise_and(EXPONENT).view(torch.float32).clamp_min_(1.0).mul_(0.5)


def nearest(ratio: torch.Tensor) -> torch.Tensor:
    """Round float32 to nearest, ties to even, in place. Magnitudes are at most 6.

    Adding and subtracting 1.5 * 2^23 units clears the bits below them, rounding to nearest even.
    """
    units = spacing(ratio).mul_(1.5 * 2.0**23)
    return ratio.add_(units).sub_(units)


def stochastic(ratio: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Round away from zero where ``noise`` is below the distance from the number towards zero.

    Magnitudes are at most 6, of float32. A number of E2M1 stays itself.
    """
    apart = spacing(ratio)
    units = ratio.abs().div_(apart)
    inner = units.floor()
    return inner.add_(noise < units.sub_(inner)).mul_(apart).copysign_(ratio)
