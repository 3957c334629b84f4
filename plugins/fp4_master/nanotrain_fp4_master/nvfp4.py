"""NVFP4: sixteen E2M1 numbers with an E4M3 scale, and a scale for the whole tensor: 4.5 bits a weight.

E2M1 has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6, rounded to nearest with ties to the even code. A
block's scale is its largest magnitude over 6, over the tensor's scale, as an E4M3 number.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149, appendix B. Unlike there,
the tensor's scale is a power of two (:data:`POWERS`) instead of a float32 number, and a block's scale is a
normal E4M3 number (2^-6 to 448) or 0, never subnormal. Both together then fit in one byte, and weights are
bfloat16 numbers.
"""

from __future__ import annotations

from functools import cache

import torch

BLOCK = 16
#: Largest E2M1 magnitude.
LARGEST = 6.0
#: Smallest normal and largest E4M3 number.
SCALES = (2.0**-6, 448.0)


def step(magnitude: torch.Tensor) -> torch.Tensor:
    """Return the spacing of E2M1 numbers from a magnitude upwards: 0.5; 1 from 2 on; 2 from 4 on.

    It is half of the largest power of two up to the magnitude, which float32's exponent bits give.
    """
    return magnitude.clamp(1, 4).view(torch.int32).bitwise_and_(0x7F800000).view(torch.float32).mul_(0.5)


def nearest(x: torch.Tensor) -> torch.Tensor:
    """Round to E2M1 numbers, kept in float32. Beyond 6 is 6."""
    apart = step(x.abs())
    return ((x / apart).round() * apart).clamp(-LARGEST, LARGEST)


def neighbors(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the E2M1 numbers on either side of ``x``, that towards 0 first; the same one twice at 6."""
    magnitude = x.abs().clamp(max=LARGEST)
    apart = step(magnitude)
    inner = (magnitude / apart).floor() * apart
    outer = (inner + apart).clamp(max=LARGEST)
    return torch.copysign(inner, x), torch.copysign(outer, x)


def half_gap(x: torch.Tensor) -> torch.Tensor:
    """Return half the way from E2M1 numbers to the next one further from 0."""
    return step(x.abs()) / 2


def to_codes(x: torch.Tensor) -> torch.Tensor:
    """Return the 4-bit codes of E2M1 numbers: a sign, two bits of exponent, one of mantissa. uint8.

    The upper ten bits of float32 identify an E2M1 number: the sign, the exponent, and one of mantissa.
    """
    upper = (x.float().contiguous().view(torch.int32) >> 22).bitwise_and_(1023)
    return every_code(x.device).index_select(0, upper.view(-1)).view(x.shape)


@cache
def every_code(device: torch.device) -> torch.Tensor:
    """Return the code for the upper bits of each E2M1 number [1024], uint8; 0 for all others."""
    codes = torch.arange(16, dtype=torch.uint8, device=device)
    table = torch.zeros(1024, dtype=torch.uint8, device=device)
    table[(from_codes(codes).view(torch.int32) >> 22) & 1023] = codes
    return table


def from_codes(codes: torch.Tensor) -> torch.Tensor:
    """Return the E2M1 numbers of 4-bit codes, float32."""
    code = (codes & 7).float()
    magnitude = torch.where(code < 4, code / 2, torch.where(code < 6, code - 2, code * 2 - 8))
    return torch.where(codes >= 8, -magnitude, magnitude)


#: Bytes that a block's scale takes, in the form of :func:`to_bytes`.
SCALE_BYTES = 1
#: Exponent bias of a stored scale, with which the least exponent becomes 1; and the byte that stores NaN.
BIAS, NAN = 25, 1
#: The least and the largest power of two that a tensor's scale may be, so that all block scales have a byte.
POWERS = (-18, -2)
#: Largest scale of a block, and largest weight.
LARGEST_SCALE = SCALES[1] * 2.0 ** POWERS[1]
LARGEST_WEIGHT = LARGEST * LARGEST_SCALE


def to_bytes(scales: torch.Tensor) -> torch.Tensor:
    """Return scales [N, 1], an E4M3 number times a power of two in :data:`POWERS`, as bytes [N, 1].

    A scale has no sign, so its byte has five bits of exponent and three of mantissa, for 2^-24 to 112; the
    published format stores an E4M3 number and a scale of the tensor instead. Larger scales become NaN.
    """
    bits = scales.float().contiguous().view(torch.int32)
    code = (((bits >> 23) - 127 + BIAS) << 3) | ((bits >> 20) & 7)
    code = torch.where(scales == 0, 0, code)
    return torch.where(scales <= LARGEST_SCALE, code, NAN).to(torch.uint8)


def from_bytes(stored: torch.Tensor) -> torch.Tensor:
    """Undo :func:`to_bytes`: float32."""
    return every_scale(stored.device)[stored.int()]


@cache
def every_scale(device: torch.device) -> torch.Tensor:
    """Return what each byte means [256], float32."""
    code = torch.arange(256, dtype=torch.int32, device=device)
    scales = ((((code >> 3) - BIAS + 127) << 23) | ((code & 7) << 20)).view(torch.float32).clone()
    scales[0], scales[NAN] = 0.0, torch.nan
    return scales
