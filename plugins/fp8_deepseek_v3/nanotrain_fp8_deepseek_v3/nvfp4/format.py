"""NVFP4: sixteen E2M1 numbers share an E4M3 scale, and a tensor has a float32 scale above those.

E2M1 has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6. With amax_b the largest magnitude of a block and amax
that of the tensor::

    s_enc   = 6 * 448 / amax                       s_dec = 1 / s_enc
    scale_b = e4m3(amax_b / 6 * s_enc)             code  = e2m1(x * (1 / (scale_b * s_dec)))
    value   = code * scale_b * s_dec

- All of this is in float32, and both roundings are to nearest, ties to even.
- ``float32`` is that definition. With ``power_of_two`` s_dec is the next power of two that is not below
  amax / (6 * 448). Then scale_b * s_dec does not depend on amax, except for blocks whose scale is subnormal
  in E4M3, as none is with an amax_b of at least 2^-13 amax. Ranks that hold other parts of a tensor, or an
  expert's rows beside other rows, so round a block alike.
- Rounding scale_b down can leave elements of a block beyond 6: up to 6 * 17/16, more only where scale_b is
  subnormal. They saturate to 6, as in Transformer Engine. No scale saturates: amax_b / 6 * s_enc is at most
  448.
- A block with amax_b / 6 * s_enc of at most 2^-10, half of the smallest E4M3 number, becomes zeros.
- A block with an infinite or NaN element has the scale NaN, and all of its values are NaN. amax is that of
  the others.

Shapes: R rows, C columns; r, c their blocks; a leading E, of stacked weights, has a tensor scale each.

Source: NVIDIA, arXiv 2509.25149, appendix B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from nanotrain_fp8_deepseek_v3.formats import EXPONENT, MANTISSA, largest_of
from nanotrain_fp8_deepseek_v3.nvfp4.hadamard import transform
from nanotrain_fp8_deepseek_v3.nvfp4.rounding import nearest, noise_of, stochastic

#: Elements along a block.
BLOCK = 16
#: The largest E2M1 and E4M3 numbers.
LARGEST, LARGEST_SCALE = 6.0, 448.0
#: The E2M1 number of each code: a sign, two bits of exponent and one of mantissa.
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

FLOAT32_MAX = torch.finfo(torch.float32).max
#: The least power of two that is a scale of a tensor: its reciprocal is finite in float32.
SMALLEST_POWER = 2.0**-126

#: Elements rounded at once on a CPU: they and what is computed of them fit in its cache.
IN_CACHE = 2**15

#: How the scale of a tensor is chosen.
TensorScale = Literal["power_of_two", "float32"]


@dataclass(eq=False)
class Blocks:
    """A tensor in NVFP4, padded with zeros to whole blocks."""

    source: torch.Tensor
    """[..., r, h, c, w], float32: the rounded elements before rounding, transformed if they are."""
    grid: torch.Tensor
    """[..., r, h, c, w], float32: the E2M1 numbers."""
    scales: torch.Tensor
    """[..., r, 1, c, 1], float32: E4M3 numbers."""
    tensor_scale: torch.Tensor
    """[..., 1, 1, 1, 1], float32: s_dec."""

    def values(self) -> torch.Tensor:
        """Return the values [..., R, C] of whole blocks, float32: rounded, if s_dec is no power of two."""
        return _joined(self.grid * self.scales * self.tensor_scale)

    def codes(self) -> torch.Tensor:
        """Return the 4-bit codes [..., R, C] of whole blocks, uint8; what became 0 keeps its sign."""
        return _joined(to_codes(self.grid, self.source))

    def at_largest(self) -> torch.Tensor:
        """Return which elements have a code of 6 or -6 [..., R, C], but for blocks that became zeros."""
        return _joined((self.grid.abs() == LARGEST) & (self.scales > 0))

    def whole(self) -> torch.Tensor:
        """Return what was rounded [..., R, C]: padded, and transformed if it was."""
        return _joined(self.source)


def quantize(
    x: torch.Tensor,
    tile: tuple[int, int] = (1, BLOCK),
    *,
    tensor_scale: TensorScale = "power_of_two",
    hadamard: bool = False,
    stochastically: bool = False,
) -> Blocks:
    """Round ``x`` [..., R, C] to NVFP4.

    Args:
        x: of any floating-point dtype.
        tile: rows and columns of a block: 1 x 16, 16 x 1 or 16 x 16.
        tensor_scale: see above.
        hadamard: transform each block first; not of 16 x 16.
        stochastically: round stochastically instead of to nearest; not of 16 x 16.
    """
    high, wide = tile
    missing = -x.shape[-2] % high, -x.shape[-1] % wide
    whole = F.pad(x, (0, missing[1], 0, missing[0])) if any(missing) else x.contiguous()
    shape = (*x.shape[:-2], whole.shape[-2] // high, high, whole.shape[-1] // wide, wide)
    pieces, along = whole.view(shape).float(), -1 if wide > 1 else -3
    source = transform(pieces, along) if hadamard else pieces
    scales, of_tensor = _scales_of(largest_of(source), tensor_scale)
    factors = (torch.ones_like(of_tensor) / (scales * of_tensor)).clamp(max=FLOAT32_MAX)

    def rounded(source: torch.Tensor, factor: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
        ratio = (source * factor).clamp_(-LARGEST, LARGEST)
        return stochastic(ratio, noise_of(plain, along)) if stochastically else nearest(ratio)

    if source.device.type != "cpu" or torch.compiler.is_compiling():
        return Blocks(source, rounded(source, factors, pieces), scales, of_tensor)
    grid = torch.empty_like(source)
    rows = [each.flatten(0, -4) for each in (grid, source, factors, pieces)]
    count = max(1, IN_CACHE // max(1, rows[0][:1].numel()))
    for place, *given in zip(*(torch.split(each, count) for each in rows), strict=True):
        place.copy_(rounded(*given))
    return Blocks(source, grid, scales, of_tensor)


def _scales_of(amax: torch.Tensor, how: TensorScale) -> tuple[torch.Tensor, torch.Tensor]:
    """Return E4M3 scales, and s_dec, of blocks with these largest magnitudes [..., r, 1, c, 1], in float32.

    Divisors are tensors: on CUDA torch multiplies by the rounded reciprocal of a Python number.
    """
    finite = amax.where(amax.isfinite(), 0.0)
    largest = finite.amax((-4, -2), keepdim=True) if finite.numel() else finite.new_zeros(_of_none(finite))
    span, six = (finite.new_full((), number) for number in (LARGEST * LARGEST_SCALE, LARGEST))
    if how == "power_of_two":
        power = (largest / span).view(torch.int32).add(MANTISSA).bitwise_and_(EXPONENT).view(torch.float32)
        decode = power.clamp_min(SMALLEST_POWER)
        encode = torch.ones_like(decode) / decode
    else:
        encode = torch.where(largest == 0, 1.0, (span / largest).clamp(max=FLOAT32_MAX))
        decode = torch.ones_like(encode) / encode
    scales = (finite / six * encode).clamp(max=LARGEST_SCALE).to(torch.float8_e4m3fn).float()
    return scales.where(amax.isfinite(), torch.nan), decode


def _of_none(amax: torch.Tensor) -> tuple[int, ...]:
    return *amax.shape[:-4], 1, 1, 1, 1


def _joined(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.flatten(-4, -3).flatten(-2, -1)


# --- codes ------------------------------------------------------------------------------------------


def to_codes(grid: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Return the codes of E2M1 numbers, uint8, with the signs of another tensor.

    From 1 on a code is the exponent and the first bit of the mantissa of a float32 number, minus a constant.
    """
    magnitude = grid.abs()
    upper = (magnitude.view(torch.int32) >> 22) - 252
    code = torch.where(magnitude < 1, (magnitude * 2).to(torch.int32), upper)
    return (code + 8 * signs.signbit()).bitwise_and_(15).to(torch.uint8)


def pack(codes: torch.Tensor, dim: int) -> torch.Tensor:
    """Return two codes in each byte, neighbors along ``dim``, negative: the first in the lower four bits."""
    pairs = codes.unflatten(dim, (codes.shape[dim] // 2, 2))  # type: ignore[no-untyped-call]
    first, second = pairs.unbind(dim)
    return torch.as_tensor(first | (second << 4))


def unpack(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the E2M1 numbers of codes that were packed along ``dim``, float32."""
    codes = torch.stack([packed & 15, packed >> 4], dim).flatten(dim - 1, dim)
    return torch.tensor(VALUES, device=packed.device)[codes.int()]
