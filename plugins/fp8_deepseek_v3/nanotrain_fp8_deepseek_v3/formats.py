"""Eight-bit floating-point formats, and tensors rounded to them with a scale for each tile.

A tile's scale is its largest magnitude over the largest number of the format, in float32; each element is
divided by it in float32 and rounded to nearest, ties to even::

    scale = max(amax / largest, 2^-126)        code = round(x / scale)        value = code * scale

- A power-of-two scale is the next such number that is not smaller. Then a value has no more significant bits
  than its code, and being rounded again, in tiles of any shape, leaves the largest of a tile as it is.
- A tile of zeros has codes and values of zero. Nothing saturates: x / scale is at most the largest number.
- One element that is infinite or NaN makes all values of its tile NaN: whoever sums over it notices.
- The last tile of a row may be shorter.

Shapes: R rows, C columns; r, c their tiles.

Sources: DeepSeek-V3, arXiv 2412.19437, section 3.3.2; Micikevicius et al., arXiv 2209.05433 (the formats).
"""

from __future__ import annotations

from functools import cache

import attrs
import torch

#: The smallest scale, float32's smallest normal number: below, a quotient by it would lose bits.
SMALLEST_SCALE = 2.0**-126

#: Numbers that are rounded at once: they and their units stay in a processor's cache.
IN_CACHE = 2**16

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

    @property
    def largest(self) -> float:
        """Return the largest finite number."""
        return torch.finfo(self.dtype).max

    def round_(self, x: torch.Tensor) -> torch.Tensor:
        """Round float32 ``x`` in place to numbers of this format, none of it being beyond the largest.

        Adding and taking away 1.5 * 2^23 units in the last place leaves no bit below them, and the addition
        rounds to nearest even. Faster on a CPU than to convert to eight bits and back, and the same but for
        the sign of what becomes zero.
        """
        for piece in torch.split(x.view(-1), IN_CACHE):
            units = piece.view(torch.int32).bitwise_and(EXPONENT).view(torch.float32)
            units.clamp_min_(self.smallest).mul_(1.5 * 2.0 ** (23 - self.mantissa))
            piece.add_(units).sub_(units)
        return x

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Return ``codes`` as float32: by table on a CPU, where torch converts one at a time."""
        if codes.device.type != "cpu":
            return codes.float()
        index = codes.contiguous().view(torch.uint8).flatten().int()
        return _table(self.dtype).index_select(0, index).view(codes.shape)


@cache
def _table(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).float()


E4M3 = Format(torch.float8_e4m3fn, mantissa=3, smallest=2.0**-6)
E5M2 = Format(torch.float8_e5m2, mantissa=2, smallest=2.0**-14)

#: Elements along a side of a tile or block.
TILE = 128


@attrs.define(eq=False)
class Tiled:
    """A tensor [..., R, C] divided by the scales of its tiles, to be rounded."""

    quotients: torch.Tensor
    """[..., r, tile rows, c, tile columns], float32: filled up with zeros to whole tiles."""
    scales: torch.Tensor
    """[..., r, 1, c, 1], float32."""
    shape: tuple[int, int]
    """(R, C)."""
    format: Format
    _codes: torch.Tensor | None = None

    def codes(self) -> torch.Tensor:
        """Return the numbers in eight bits [..., R, C]."""
        if self._codes is None:
            self._codes = self.quotients.to(self.format.dtype)
        return _cropped(_joined(self._codes), self.shape).contiguous()

    def values(self) -> torch.Tensor:
        """Return what the codes and scales mean [..., R, C], float32. The last call: it reuses memory."""
        codes, form = self._codes, self.format
        grid = form.round_(self.quotients) if codes is None else form.decode(codes)
        return _cropped(_joined(grid.mul_(self.scales)), self.shape)


def quantise(
    x: torch.Tensor, tile: tuple[int, int], format_: Format = E4M3, *, power_of_two: bool = False
) -> Tiled:
    """Scale ``x`` [..., R, C] tile by tile; it is rounded when its codes or values are asked for.

    Args:
        x: of any floating-point dtype.
        tile: rows and columns of a tile; 0: all of them.
        format_: what to round to.
        power_of_two: have scales that are powers of two.
    """
    R, C = x.shape[-2:]
    rows, columns = (
        size if 0 < size <= length else max(1, length) for size, length in zip(tile, (R, C), strict=True)
    )
    wide = _float32_copy(x, -(-R // rows) * rows, -(-C // columns) * columns)
    tiles = wide.view(*x.shape[:-2], -(-R // rows), rows, -(-C // columns), columns)
    scales = scale_of(largest_of(tiles), format_, power_of_two=power_of_two)
    return Tiled(tiles.div_(scales), scales, (R, C), format_)


def _float32_copy(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return a float32 copy with so many rows and columns, zeros among them."""
    R, C = x.shape[-2:]
    wide = torch.empty(*x.shape[:-2], rows, columns, dtype=torch.float32, device=x.device)
    wide[..., :R, :C].copy_(x)
    wide[..., R:, :].zero_()
    wide[..., :R, C:].zero_()
    return wide


def largest_of(tiles: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude in each tile, [..., r, 1, c, 1]; NaN where there is one."""
    if not tiles.numel():
        return tiles.new_zeros(*tiles.shape[:-3], 1, tiles.shape[-2], 1)
    over = tuple(dim for dim in (-1, -3) if tiles.shape[dim] > 1)
    return tiles.abs().amax(over, keepdim=True) if over else tiles.abs()


def scale_of(amax: torch.Tensor, format_: Format, *, power_of_two: bool = False) -> torch.Tensor:
    """Return the scales of tiles with these largest magnitudes, in float32."""
    scales = (amax / format_.largest).clamp_min_(SMALLEST_SCALE)
    return _next_power_of_two(scales) if power_of_two else scales


def _next_power_of_two(scales: torch.Tensor) -> torch.Tensor:
    """Return the least powers of two that are not smaller: a carry out of the mantissa is the next one."""
    rounded = scales.view(torch.int32).add(MANTISSA).bitwise_and_(EXPONENT).view(torch.float32)
    return torch.where(scales.isfinite(), rounded, scales)


def dequantise(codes: torch.Tensor, scales: torch.Tensor, format_: Format, tile: int = TILE) -> torch.Tensor:
    """Return the values [R, C] of codes [R, C] with scales [R, c] of tiles of one row."""
    R, C = codes.shape
    values = format_.decode(codes)
    if tile >= C:
        return values.mul_(scales)
    if C % tile:
        return values.mul_(scales.repeat_interleave(tile, 1)[:, :C])
    return values.view(R, C // tile, tile).mul_(scales.unsqueeze(-1)).view(R, C)


def _joined(tiles: torch.Tensor) -> torch.Tensor:
    return tiles.flatten(-4, -3).flatten(-2, -1)


def _cropped(x: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    return x if x.shape[-2:] == shape else x[..., : shape[0], : shape[1]]
