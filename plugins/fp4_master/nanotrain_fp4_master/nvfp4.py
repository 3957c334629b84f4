"""NVFP4: sixteen E2M1 numbers with an E4M3 scale, and a float32 scale for the whole tensor: 4.5 bits a
weight.

E2M1 has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6, rounded to nearest with ties to the even code. A
block's scale is its largest magnitude over 6, over the tensor's scale, as a normal E4M3 number (2^-6 to
448).

Source: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149, appendix B.
"""

from __future__ import annotations

import torch

from nanotrain_fp4_master.pack import pack, unpack

BLOCK = 16
#: Largest E2M1 magnitude.
LARGEST = 6.0
#: Smallest normal and largest E4M3 number.
SCALES = (2.0**-6, 448.0)


def tensor_scale(largest: torch.Tensor) -> torch.Tensor:
    """Return the usual scale of a tensor whose largest magnitude, above 0, is given: float32."""
    return largest.float() / (LARGEST * SCALES[1])


def block_scales(blocks: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the E4M3 scale of each of ``blocks`` [N, 16], [N, 1], under a tensor's ``scale``."""
    largest = blocks.abs().amax(dim=1, keepdim=True)
    return (largest / LARGEST / scale).clamp(*SCALES).to(torch.float8_e4m3fn)


def step(magnitude: torch.Tensor) -> torch.Tensor:
    """Return how far E2M1 numbers are apart from a magnitude upwards: 0.5, from 2 on 1, from 4 on 2.

    That is half of the power of two below it, which float32 has in its exponent.
    """
    return magnitude.clamp(1, 4).view(torch.int32).bitwise_and_(0x7F800000).view(torch.float32).mul_(0.5)


def nearest(x: torch.Tensor) -> torch.Tensor:
    """Round to E2M1 numbers, kept in float32. Beyond 6 is 6."""
    apart = step(x.abs())
    return ((x / apart).round() * apart).clamp(-LARGEST, LARGEST)


def neighbours(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
    """Return the 4-bit codes of E2M1 numbers: a sign, two bits of exponent, one of mantissa. uint8."""
    magnitude = x.abs()
    small = torch.where(magnitude < 2, magnitude * 2, magnitude + 2)
    code = torch.where(magnitude < 4, small, magnitude / 2 + 4)
    return code.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


def from_codes(codes: torch.Tensor) -> torch.Tensor:
    """Return the E2M1 numbers of 4-bit codes, float32."""
    code = (codes & 7).float()
    magnitude = torch.where(code < 4, code / 2, torch.where(code < 6, code - 2, code * 2 - 8))
    return torch.where(codes >= 8, -magnitude, magnitude)


def quantise(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed codes, uint8 [N * 8], and block scales, E4M3 [N], of ``x`` flattened.

    A ragged last block is filled with zeros. A block with a NaN gets the scale NaN, and infinity the largest
    number there is.

    Args:
        x: float32 or narrower.
        scale: of the tensor, float32, above 0: see :func:`tensor_scale`.
    """
    flat = x.float().flatten()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = block_scales(blocks, scale)
    numbers = nearest(blocks / (scale * scales.float()))
    return pack(to_codes(numbers.nan_to_num(0.0))), scales.flatten()


def dequantise(codes: torch.Tensor, scales: torch.Tensor, scale: torch.Tensor, length: int) -> torch.Tensor:
    """Return ``length`` weights in float32."""
    numbers = from_codes(unpack(codes)).view(-1, BLOCK)
    return (numbers * (scale * scales.float().unsqueeze(1))).flatten()[:length]
