"""Eight-bit floating-point formats, and tensors rounded to them with a scale for each tile.

A tile's scale is its largest magnitude over the largest number of the format, in float32; each element is
divided by it in float32 and rounded to nearest, ties to even::

    scale = max(amax / largest, 2^-126)        code = round(x / scale)        value = code * scale

- A power-of-two scale is the next power of two that is not smaller. Then a value has no more significant bits
  than its code, and rounding it again, in tiles of any shape, leaves the largest of a tile unchanged.
- A scale of MX is a power of two that fits in eight bits (E8M0, from 2^-127): the next one that is not
  smaller ("ceil"), or the one that makes the leading bit of the largest element that of the format's largest
  value ("floor", as the specification proposes): what is then above 448 of E4M3 saturates.
- A tile of zeros has codes and values of zero. Apart from "floor" nothing saturates: x / scale is at most the
  largest value.
- One infinite or NaN element makes all values of its tile NaN, so that every sum over it shows it.
- The last tile of a row may be shorter.

Shapes: R rows, C columns; r, c their tiles.

Sources: DeepSeek-V3, arXiv 2412.19437, section 3.3.2; Micikevicius et al., arXiv 2209.05433 (the formats);
OCP Microscaling Formats (MX) v1.0, sections 5.4.1 and 6.3 ("floor"); Mishra et al., arXiv 2506.08027
("ceil").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, gcd, log2
from typing import Literal

import attrs
import torch
import torch.nn.functional as F

#: The smallest scale, float32's smallest normal number: a division by less would lose bits.
SMALLEST_SCALE = 2.0**-126
#: That of MX, the smallest number of E8M0.
SMALLEST_E8M0 = 2.0**-127

#: How MX rounds the logarithm of a scale.
Rounding = Literal["ceil", "floor"]

#: Elements rounded at once: they and their temporaries fit in a processor's cache.
IN_CACHE = 2**17

EXPONENT = 0x7F800000
MANTISSA = 0x007FFFFF


@attrs.define(frozen=True)
class Format:
    """An eight-bit floating-point format."""

    dtype: torch.dtype
    mantissa: int
    """Bits after the leading one."""
    smallest: float
    """The smallest normal number."""
    half: float = 1.0
    """Ratio of a value to the float16 value with the same leading bits."""

    @property
    def largest(self) -> float:
        """Return the largest finite value."""
        return torch.finfo(self.dtype).max

    def round_(self, x: torch.Tensor) -> torch.Tensor:
        """Round float32 ``x`` in place to values of this format; all must be within its range.

        Adding and subtracting 1.5 * 2^23 units in the last place clears the bits below them, and the addition
        rounds to nearest even. Faster on a CPU than converting to eight bits and back, and the same except
        for the sign of values that become zero.
        """
        for piece in torch.split(x.view(-1), IN_CACHE):
            units = piece.view(torch.int32).bitwise_and(EXPONENT).view(torch.float32)
            units.clamp_min_(self.smallest).mul_(1.5 * 2.0 ** (23 - self.mantissa))
            piece.add_(units).sub_(units)
        return x

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Return ``codes`` as float32, divided by ``half``. NaN of E4M3 is decoded as a number here.

        On a CPU through float16, whose upper bits they are: torch converts elements one at a time.
        """
        if codes.device.type != "cpu":
            return codes.float().mul_(1 / self.half)
        bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(10 - self.mantissa)
        if self.half != 1.0:
            bits.bitwise_and_(~0x4000)  # another copy of the sign
        return bits.view(torch.float16).float()


E4M3 = Format(torch.float8_e4m3fn, mantissa=3, smallest=2.0**-6, half=2.0**8)
E5M2 = Format(torch.float8_e5m2, mantissa=2, smallest=2.0**-14)

#: Elements along one side of a tile or block.
TILE = 128


#: Pieces of tiles shorter than this are slower than padding the tensor to whole tiles.
SHORTEST = 16


@dataclass(eq=False)
class Tiled:
    """A tensor [..., R, C] divided by the scales of its tiles, to be rounded.

    Where a last tile is shorter, tiles are made of pieces whose length divides the dimension, or if those
    were too short, the tensor is padded with zeros.
    """

    quotients: torch.Tensor
    """[..., pieces along R, rows, pieces along C, columns], float32."""
    scales: torch.Tensor
    """[..., r, 1, c, 1], float32."""
    of_pieces: torch.Tensor
    """[..., pieces along R, 1, pieces along C, 1], float32: the scale of each."""
    shape: tuple[int, int]
    """(R, C)."""
    format: Format
    _codes: torch.Tensor | None = None
    """Padded, if necessary."""

    def codes(self) -> torch.Tensor:
        """Return the codes in eight bits [..., R, C]; call it before ``values``."""
        if self._codes is None:
            self._codes = self.quotients.to(self.format.dtype)
        return _cropped(_joined(self._codes), self.shape).contiguous()

    def at_largest(self) -> torch.Tensor:
        """Return which codes are the format's largest number [..., R, C]; call it before ``values``."""
        return self.codes().float().abs_() == self.format.largest

    def values(self) -> torch.Tensor:
        """Return the values of codes and scales [..., R, C], float32. Call it last: it reuses memory."""
        form, scales = self.format, self.of_pieces
        if self._codes is None:
            grid = form.round_(self.quotients)
        else:
            grid, scales = form.decode(self._codes), _of_halves(scales, form)
        return _cropped(_joined(grid.mul_(scales)), self.shape)


def quantize(
    x: torch.Tensor,
    tile: tuple[int, int],
    format_: Format = E4M3,
    *,
    power_of_two: bool = False,
    e8m0: Rounding | None = None,
    consume: bool = False,
) -> Tiled:
    """Scale ``x`` [..., R, C] tile by tile; it is rounded when its codes or values are requested.

    Args:
        x: of any floating-point dtype.
        tile: rows and columns of a tile; 0: all of them.
        format_: target format.
        power_of_two: use scales that are powers of two.
        e8m0: use those of MX, rounded like this.
        consume: ``x`` may be overwritten.
    """
    R, C = x.shape[-2:]
    (rows, high), (columns, wide) = (_cut(length, size) for length, size in zip((R, C), tile, strict=True))
    missing = -R % high, -C % wide
    whole = F.pad(x, (0, missing[1], 0, missing[0])) if any(missing) else x.contiguous()
    pieces = whole.view(*x.shape[:-2], whole.shape[-2] // high, high, whole.shape[-1] // wide, wide)
    amax = largest_of(pieces)
    largest = _merged(_merged(amax, -4, rows // high), -2, columns // wide)
    if e8m0 is None:
        scales = scale_of(largest, format_, power_of_two=power_of_two)
    else:
        scales = e8m0_scale_of(largest, format_, e8m0)
    of_pieces = scales
    for dim, count in ((-4, rows // high), (-2, columns // wide)):
        if count > 1:
            of_pieces = of_pieces.repeat_interleave(count, dim).narrow(dim, 0, amax.shape[dim])
    quotients = _divided(pieces, of_pieces, own=consume or whole is not x)
    if e8m0 == "floor":
        quotients.clamp_(-format_.largest, format_.largest)
    return Tiled(quotients, scales, of_pieces, (R, C), format_)


def quantize_groups(
    x_RC: torch.Tensor, groups: Sequence[int], format_: Format = E4M3, *, power_of_two: bool = False
) -> Tiled:
    """Scale ``x`` [R, C], one scale per group of rows; the resulting scales are per row, [R, 1, 1, 1].

    Args:
        x_RC: of any floating-point dtype.
        groups: number of rows of each, R in total; a group may have none.
        format_: target format.
        power_of_two: use scales that are powers of two.
    """
    R, C = x_RC.shape
    rows = x_RC.contiguous().view(R, 1, 1, C)
    counts = torch.tensor(groups, device=x_RC.device)
    whose_R = torch.arange(len(groups), device=x_RC.device).repeat_interleave(counts, output_size=R)
    amax = largest_of(rows).view(R)
    amax = amax.new_zeros(len(groups)).scatter_reduce_(0, whose_R, amax, "amax")
    scales = scale_of(amax, format_, power_of_two=power_of_two)[whose_R].view(R, 1, 1, 1)
    return Tiled(_divided(rows, scales, own=False), scales, scales, (R, C), format_)


def _divided(pieces: torch.Tensor, scales: torch.Tensor, *, own: bool) -> torch.Tensor:
    """Return the quotients in float32; ``own``: ``pieces`` may be overwritten."""
    if own or pieces.dtype != torch.float32:
        return pieces.float().div_(scales)
    return pieces.div(scales)


def _cut(length: int, tile: int) -> tuple[int, int]:
    """Return the length of a tile, and of the pieces that it consists of."""
    size = tile if 0 < tile <= length else max(1, length)
    piece = gcd(size, length)
    return size, piece if piece >= min(SHORTEST, size) else size


def _merged(amax: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """Return the maximum of every ``count`` elements along a dimension."""
    if count == 1:
        return amax
    missing = -amax.shape[dim] % count
    filled = torch.cat([amax, amax.new_zeros(()).expand_as(amax.narrow(dim, 0, missing))], dim)
    largest: torch.Tensor = filled.unflatten(dim, (-1, count)).amax(dim)  # type: ignore[no-untyped-call]
    return largest


def largest_of(pieces: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude in each piece, [..., r, 1, c, 1], in float32; NaN where there is one.

    Magnitudes are ordered as their bits, with NaN largest, and integers are compared faster.
    """
    if not pieces.numel():
        return pieces.new_zeros(*pieces.shape[:-3], 1, pieces.shape[-2], 1, dtype=torch.float32)
    bits = pieces.view(_BITS[pieces.dtype])
    magnitudes = bits.bitwise_and(torch.iinfo(bits.dtype).max)
    for dim in (-3, -1):
        if magnitudes.shape[dim] > 1:
            magnitudes = magnitudes.amax(dim, keepdim=True)
    return magnitudes.view(pieces.dtype).float()


_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


def scale_of(amax: torch.Tensor, format_: Format, *, power_of_two: bool = False) -> torch.Tensor:
    """Return the scales of tiles with these largest magnitudes, in float32.

    The divisor is a tensor: on CUDA torch multiplies by the rounded reciprocal of a Python number, which
    changes the last bit of more than half of all scales.
    """
    largest = amax.new_full((), format_.largest)
    scales = (amax / largest).clamp_min_(SMALLEST_SCALE)
    return _next_power_of_two(scales) if power_of_two else scales


def e8m0_scale_of(amax: torch.Tensor, format_: Format, rounding: Rounding) -> torch.Tensor:
    """Return the scales of MX blocks with these largest magnitudes, in float32; none is made finite."""
    if rounding == "floor":
        leading = amax.view(torch.int32).bitwise_and(EXPONENT).view(torch.float32)
        scales = torch.where(amax.isfinite(), leading / 2.0 ** floor(log2(format_.largest)), amax)
        return scales.clamp_min_(SMALLEST_E8M0)
    scales = amax / amax.new_full((), format_.largest)
    return _next_power_of_two(scales).masked_fill_(scales <= SMALLEST_E8M0, SMALLEST_E8M0)


def _next_power_of_two(scales: torch.Tensor) -> torch.Tensor:
    """Return the least powers of two that are not smaller: a carry out of the mantissa is the next one."""
    rounded = scales.view(torch.int32).add(MANTISSA).bitwise_and_(EXPONENT).view(torch.float32)
    return torch.where(scales.isfinite(), rounded, scales)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, format_: Format, tile: int = TILE) -> torch.Tensor:
    """Return the values [R, C] of codes [R, C] with scales [R, c] of tiles of one row."""
    R, C = codes.shape
    values, scales = format_.decode(codes), _of_halves(scales, format_)
    if tile >= C:
        return values.mul_(scales)
    if C % tile:
        return values.mul_(scales.repeat_interleave(tile, 1)[:, :C])
    return values.view(R, C // tile, tile).mul_(scales.unsqueeze(-1)).view(R, C)


def dequantize_columns(
    codes_RC: torch.Tensor, scales_rC: torch.Tensor, format_: Format, tile: int = TILE
) -> torch.Tensor:
    """Return the values [R, C] of codes [R, C] with scales [r, C] of tiles of one column."""
    R = len(codes_RC)
    values, scales = format_.decode(codes_RC), _of_halves(scales_rC, format_)
    return values.mul_(scales if tile >= R else scales.repeat_interleave(tile, 0)[:R])


def _of_halves(scales: torch.Tensor, format_: Format) -> torch.Tensor:
    """Return the factor of decoded values: NaN for infinity, so that all of its tile is NaN."""
    return (scales + scales * 0.0) * format_.half


def _joined(tiles: torch.Tensor) -> torch.Tensor:
    return tiles.flatten(-4, -3).flatten(-2, -1)


def _cropped(x: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    return x if x.shape[-2:] == shape else x[..., : shape[0], : shape[1]]
