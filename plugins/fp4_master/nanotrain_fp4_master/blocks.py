"""Weights in blocks that share a scale, in NVFP4 or NF4: the choice of scales, and rounding.

Results are bfloat16 numbers, the dtype of checkpoints and of GEMM operands. For NVFP4 this requires that the
tensor's scale is a power of two: the product of an E2M1 number, an E4M3 number and that scale then has at
most six significant bits. An NF4 scale is itself a bfloat16 number.

A block's scale can be recovered from its rounded weights, because the largest magnitude is always the
format's largest number times the scale. Codes and scales can therefore be recomputed from the weights, only
the weights need to be saved, and rounding is idempotent. NVFP4 has no scale for blocks 28672 times smaller
than the largest of the tensor (or of the range of it that a rank holds): they become 0, as do blocks without
a weight above 3.6e-7. It has none for blocks with a weight above 696 either; 672 is the largest representable
weight, and weights up to 696 round to it. Such a block becomes NaN, as does a block with a NaN or an
infinity, in either format.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from nanotrain_fp4_master import nf4, nvfp4

#: Found here, since torch.compile traces no call of ``find_spec``.
HAS_TRITON = find_spec("triton") is not None


class Format(Protocol):
    """Rounds blocks of weights [N, B], float32. ``noise`` is uniform in [0, 1); None: rounds to nearest."""

    block: int
    codec: Any
    """The module that encodes its numbers and scales, and that defines its largest weight."""
    fits: tuple[float, float]
    """Limits of a block's largest weight divided by its scale; outside them a new scale is chosen."""

    def fit(self, largest: torch.Tensor) -> Format:
        """Return this format with the tensor scale for weights whose largest magnitude is ``largest``."""
        ...

    def scales(self, blocks: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        """Return the scale [N, 1] of each block, rounded with ``noise`` [N, 1]; NaN if the format has none
        for it.
        """
        ...

    def scales_of(self, rounded: torch.Tensor) -> torch.Tensor:
        """Return the scales [N, 1] of blocks that are already rounded, recovered from their weights."""
        ...

    def has(self, scales: torch.Tensor) -> torch.Tensor:
        """Return, for each recovered scale, whether a block can keep it: one of the format, and not 0."""
        ...

    def nearest(self, ratio: torch.Tensor) -> torch.Tensor:
        """Round weights over their scale to the numbers of the format."""
        ...

    def neighbors(self, ratio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the two numbers of the format next to each."""
        ...

    def half_gap(self, ratio: torch.Tensor) -> torch.Tensor:
        """Return the largest error of rounding to each of these numbers of the format."""
        ...


def four_bits(x: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
    """Round positive numbers to four significant bits, as normal E4M3 numbers have, whatever their size."""
    fraction, exponent = torch.frexp(x)
    scaled = fraction * 16
    return torch.ldexp(scaled.round() if noise is None else (scaled + noise).floor(), exponent - 4)


def quotient(x: torch.Tensor, number: float) -> torch.Tensor:
    """Return ``x / number`` by division: on CUDA torch multiplies by the reciprocal of a Python number."""
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
        """Return a sixth of each block's largest weight, rounded to a normal E4M3 number times the tensor's
        scale, or to 0.

        A scale above the largest is clamped to it if only stochastic rounding exceeds it. If rounding to
        nearest does as well, there is no scale: NaN.
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


def in_triton(tensor: torch.Tensor, form: Format) -> bool:
    """Return whether there are kernels for a tensor of weights of this format, or for what belongs to it."""
    here = os.environ.get("TRITON_INTERPRET") == "1" or (tensor.is_cuda and HAS_TRITON)
    return here and isinstance(form, NVFP4Blocks) and tensor.is_contiguous()


def power_of_two(largest: torch.Tensor) -> torch.Tensor:
    """Return the scale of a tensor: the least power of two such that ``largest``, the largest scale of a
    block, is less than 448 times it.

    ``largest`` is rounded to nearest first, so that rounded weights give the same tensor scale again. A
    non-finite ``largest``, for which frexp defines no exponent, counts as the largest float32 number.
    """
    finite = largest.nan_to_num(torch.finfo(torch.float32).max)
    _, exponent = torch.frexp(quotient(four_bits(finite, None), nvfp4.SCALES[1]))
    return torch.ldexp(torch.ones_like(largest), exponent.clamp(*nvfp4.POWERS))


class NF4Blocks:
    """See :mod:`nanotrain_fp4_master.nf4`."""

    codec: Any = nf4
    fits = (0.97, 1.03)
    nearest = staticmethod(nf4.nearest)
    neighbors = staticmethod(nf4.neighbors)
    half_gap = staticmethod(nf4.half_gap)

    def __init__(self, block: int = nf4.BLOCK) -> None:
        self.block = block

    def fit(self, largest: torch.Tensor) -> NF4Blocks:
        """Return this format: NF4 has no tensor scale."""
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
    """Return blocks rounded stochastically to one of the two nearest numbers of the format.

    The expected value is the weight itself for the largest weight of each block, whose scale is rounded
    stochastically, and for all weights below 8/9 of it. Larger ones have a smaller expected value, by less
    than an eighth, where the scale was rounded down.

    Args:
        noise: for each weight [N, B].
        scale_noise: for each block [N, 1].
    """
    scales = form.scales(blocks, scale_noise)
    ratio = blocks / nonzero(scales)
    inner, outer = (on_grid(numbers, scales) for numbers in form.neighbors(ratio))
    rounded = torch.where(noise * (outer - inner).abs() < (blocks - inner).abs(), outer, inner)
    magnitude = blocks.abs()
    largest = magnitude == magnitude.amax(dim=1, keepdim=True)
    return torch.where(largest, on_grid(form.nearest(ratio), scales), rounded)


def on_grid(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return numbers of a format times their scales, rounded to bfloat16 as in the parameter; float32."""
    return (numbers * scales).bfloat16().float()


def nonzero(scales: torch.Tensor) -> torch.Tensor:
    """Return scales to divide by: 1 for blocks of zeros."""
    return torch.where(scales == 0, 1.0, scales)
