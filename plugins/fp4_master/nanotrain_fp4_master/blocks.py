"""Weights as blocks that share a scale, in NVFP4 or NF4: chosen, rounded and read back as numbers.

What comes out are bfloat16 numbers, which is what checkpoints have and GEMMs are made of. For NVFP4 that
takes a tensor's scale that is a power of two: then E2M1 times E4M3 times it has at most six significant bits.
An NF4 scale is itself a bfloat16 number.

A block's scale can be told from what was rounded: its largest magnitude is always the format's largest
number. So codes and scales can be made of the numbers again, nothing but the weights needs to be saved, and
rounding what was rounded changes nothing. NVFP4 has no scale for blocks 28672 times smaller than the largest
of the tensor (or of the range that a rank holds of it): they become 0, as do blocks without a weight above
3.6e-7. It has none for blocks with a weight above 696 either, which is what still rounds to 672, the largest
there is: such a block becomes NaN, as one with a NaN or an infinity does, in either format.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from nanotrain_fp4_master import nf4, nvfp4


class Format(Protocol):
    """How a block of weights [N, B], float32, is rounded. Noise is uniform in [0, 1); None: to nearest."""

    block: int
    codec: Any
    """The module with its codes, the bytes of its scales, and its largest weight."""
    fits: tuple[float, float]
    """Between which a block's largest weight over its scale may lie before the scale is chosen anew."""

    def fit(self, largest: torch.Tensor) -> Format:
        """Return the format for weights of which this is the largest magnitude."""
        ...

    def scales(self, blocks: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        """Return the scale [N, 1] of each block, rounded up or down by ``noise`` [N, 1]; NaN if it has
        none.
        """
        ...

    def scales_of(self, rounded: torch.Tensor) -> torch.Tensor:
        """Return the scales that rounded blocks have."""
        ...

    def has(self, scales: torch.Tensor) -> torch.Tensor:
        """Return for each scale whether a block may have it, and whether it can be told from the block."""
        ...

    def nearest(self, ratio: torch.Tensor) -> torch.Tensor:
        """Round weights over their scale to the numbers of the format."""
        ...

    def neighbors(self, ratio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the two numbers of the format next to each."""
        ...

    def half_gap(self, ratio: torch.Tensor) -> torch.Tensor:
        """Return the largest error of what is rounded to each of these numbers."""
        ...


def four_bits(x: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
    """Round positive numbers to four significant bits, as normal E4M3 numbers have, whatever their size."""
    fraction, exponent = torch.frexp(x)
    scaled = fraction * 16
    return torch.ldexp(scaled.round() if noise is None else (scaled + noise).floor(), exponent - 4)


def quotient(x: torch.Tensor, number: float) -> torch.Tensor:
    """Return ``x / number``, rounded as a division is: on CUDA torch multiplies by 1 / a Python number."""
    return x / x.new_full((), number)


class NVFP4Blocks:
    """Sixteen weights to a block. See :mod:`nanotrain_fp4_master.nvfp4`."""

    codec = nvfp4
    fits = (5.5, 6.5)
    nearest = staticmethod(nvfp4.nearest)
    neighbors = staticmethod(nvfp4.neighbors)
    half_gap = staticmethod(nvfp4.half_gap)

    def __init__(self, block: int = nvfp4.BLOCK, tensor_scale: torch.Tensor | None = None) -> None:
        self.block, self.tensor_scale = block, tensor_scale

    def fit(self, largest: torch.Tensor) -> NVFP4Blocks:
        """Choose the scale of the tensor."""
        return NVFP4Blocks(self.block, power_of_two(quotient(largest, nvfp4.LARGEST)))

    def scales(self, blocks: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        """Round a sixth of the largest weight to a normal E4M3 number, under the tensor's scale, or to 0.

        At random it may be rounded up beyond the largest there is; to nearest only where there is none.
        """
        assert self.tensor_scale is not None
        sixth = quotient(blocks.abs().amax(dim=1, keepdim=True), nvfp4.LARGEST)
        low, high = (limit * self.tensor_scale for limit in nvfp4.SCALES)
        rounded = four_bits(sixth, noise)
        rounded = torch.where(rounded < low, 0.0, rounded.clamp(max=high))
        return torch.where(four_bits(sixth, None) <= high, rounded, torch.nan)

    def scales_of(self, rounded: torch.Tensor) -> torch.Tensor:
        """Return a sixth of the largest weight."""
        return quotient(rounded.abs().amax(dim=1, keepdim=True), nvfp4.LARGEST)

    def has(self, scales: torch.Tensor) -> torch.Tensor:
        """Return whether a scale has four significant bits and is normal under the tensor's scale."""
        assert self.tensor_scale is not None
        return (four_bits(scales, None) == scales) & (scales >= nvfp4.SCALES[0] * self.tensor_scale)


def power_of_two(largest: torch.Tensor) -> torch.Tensor:
    """Return the scale of a tensor: the least power of two of which ``largest``, of the block scales, is
    less than 448 times as much.

    It is rounded to nearest first, so that the scale of what was rounded is the same again. Of what is not
    finite frexp has no exponent that it promises: that is as large as can be.
    """
    finite = largest.nan_to_num(torch.finfo(torch.float32).max)
    _, exponent = torch.frexp(quotient(four_bits(finite, None), nvfp4.SCALES[1]))
    return torch.ldexp(torch.ones_like(largest), exponent.clamp(*nvfp4.POWERS))


class NF4Blocks:
    """See :mod:`nanotrain_fp4_master.nf4`."""

    codec = nf4
    fits = (0.97, 1.03)
    nearest = staticmethod(nf4.nearest)
    neighbors = staticmethod(nf4.neighbors)
    half_gap = staticmethod(nf4.half_gap)

    def __init__(self, block: int = nf4.BLOCK) -> None:
        self.block = block

    def fit(self, largest: torch.Tensor) -> NF4Blocks:
        """There is no scale but the blocks'."""
        return self

    def scales(self, blocks: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        """Round the largest weight to bfloat16."""
        largest = blocks.abs().amax(dim=1, keepdim=True)
        rounded = largest.bfloat16().float()
        if noise is not None:
            rounded = stochastic_round_bfloat16(largest, (noise * 2**16).int())
        return torch.where(rounded.isfinite(), rounded, torch.nan)

    def scales_of(self, rounded: torch.Tensor) -> torch.Tensor:
        """Return the largest weight."""
        return rounded.abs().amax(dim=1, keepdim=True)

    def has(self, scales: torch.Tensor) -> torch.Tensor:
        """Return whether there is one."""
        return scales > 0


def stochastic_round_bfloat16(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Stochastic rounding of float32 to bfloat16: the mean over ``noise``, int32 of 0 to 65535, is ``x``."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + noise) >> 16 << 16).view(torch.float32)


def to_nearest(blocks: torch.Tensor, form: Format) -> torch.Tensor:
    """Round blocks to the format: bfloat16 numbers, in float32."""
    scales = form.scales(blocks, None)
    return on_grid(form.nearest(blocks / nonzero(scales)), scales)


def stochastic_round(
    blocks: torch.Tensor, form: Format, noise: torch.Tensor, scale_noise: torch.Tensor
) -> torch.Tensor:
    """Stochastic rounding of blocks: to one of the two nearest numbers of the format, the mean over the noise
    being the weight.

    That holds for each block's largest, through its scale, and for all weights below 8/9 of it. Above, a
    scale that was rounded down makes them smaller than they should be, by less than an eighth.

    Args:
        noise: of each weight [N, B].
        scale_noise: of each block [N, 1].
    """
    scales = form.scales(blocks, scale_noise)
    ratio = blocks / nonzero(scales)
    inner, outer = (on_grid(numbers, scales) for numbers in form.neighbors(ratio))
    rounded = torch.where(noise * (outer - inner).abs() < (blocks - inner).abs(), outer, inner)
    magnitude = blocks.abs()
    largest = magnitude == magnitude.amax(dim=1, keepdim=True)
    return torch.where(largest, on_grid(form.nearest(ratio), scales), rounded)


def on_grid(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return numbers of a format times their scales, as the parameter holds them."""
    return (numbers * scales).bfloat16().float()


def nonzero(scales: torch.Tensor) -> torch.Tensor:
    """Return scales to divide by: 1 for blocks of zeros."""
    return torch.where(scales == 0, 1.0, scales)
