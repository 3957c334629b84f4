"""Masters of 4-bit weights: the parameter is a rounded weight, the master its rounding error or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.nn.functional import pad

from nanotrain_core.api.torch import ErrorFeedback, MasterWeight, read_range, unquantized, write_range
from nanotrain_fp4_master.blocks import (
    Format,
    in_triton,
    nonzero,
    on_grid,
    quotient,
    stochastic_round,
    to_nearest,
)
from nanotrain_fp4_master.noise import Noise, chunks, first_of

#: The unit of a residual is 1/124 of the largest error of rounding to nearest; its range is +-127 units.
PARTS, REACH = 124, 127
#: A weight keeps its code until its residual, less this fraction of it, passes the midpoint to the next one.
SLACK = 0.05


class Blocks:
    """Accesses a weight as blocks, one chunk at a time, which limits the memory of temporaries."""

    def __init__(self, weight: torch.Tensor, form: Format, noise: Noise) -> None:
        self.weight, self.form, self.noise = weight, form, noise

    def of(self, tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Return elements as blocks [N, B] in float32, the last one filled with zeros."""
        flat = read_range(tensor, begin, end).float()
        return pad(flat, (0, -len(flat) % self.form.block)).view(-1, self.form.block)

    def fit(self, value: torch.Tensor) -> Format:
        """Return the format with the tensor scale for the largest magnitude of ``value``."""
        return self.form.fit(largest_of(value))

    def write(self, tensor: torch.Tensor, begin: int, end: int, blocks: torch.Tensor) -> None:
        """Write blocks to elements ``begin`` to ``end`` of ``tensor``, without the last one's padding."""
        write_range(tensor, begin, end, blocks.view(-1)[: end - begin])

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield first and last element of chunks of whole blocks."""
        return chunks(self.weight)

    def noise_for(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a random number for each weight [N, B], and one for each block [N, 1]."""
        weights = self.noise.weights(begin, end)
        weights = pad(weights, (0, -len(weights) % self.form.block)).view(-1, self.form.block)
        return weights, self.noise.blocks(begin, end, self.form.block).unsqueeze(1)


def largest_of(value: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of a tensor, float32."""
    low, high = value.aminmax()
    return torch.maximum(-low, high).float()


class Naive(MasterWeight):
    """No master bits: each update is rounded to nearest, and most are lost. A baseline for comparison."""

    bytes_beside = 0.0

    def __init__(self, weight: torch.Tensor, form: Format, noise: Noise) -> None:
        self.weight, self.blocks = weight, Blocks(weight, form, noise)
        self.store_nearest(unquantized(weight))

    def load(self) -> torch.Tensor:
        """Widen the parameter."""
        return self.weight.float()

    def store(self, value: torch.Tensor) -> None:
        """Round to nearest."""
        self.store_nearest(value)

    def store_nearest(self, value: torch.Tensor) -> None:
        """Round to nearest, into the parameter."""
        form = self.blocks.fit(value)
        for begin, end in self.blocks.chunks():
            rounded = to_nearest(self.blocks.of(value, begin, end), form)
            self.blocks.write(self.weight, begin, end, rounded)

    def state(self) -> Mapping[str, torch.Tensor]:
        """Return no tensors: :mod:`nanotrain_fp4_master.blocks` explains why the parameter is sufficient."""
        return {}


class Eco(Naive, ErrorFeedback):
    """Nothing beside the weight: rounded at random, and the optimizer carries the error in its momentum."""

    def store(self, value: torch.Tensor) -> None:
        """Round to one of the two nearest so that the mean is ``value``."""
        self.blocks.noise.begin()
        form = self.blocks.fit(value)
        for begin, end in self.blocks.chunks():
            noise, scale_noise = self.blocks.noise_for(begin, end)
            rounded = stochastic_round(self.blocks.of(value, begin, end), form, noise, scale_noise)
            self.blocks.write(self.weight, begin, end, rounded)

    def error(self, value: torch.Tensor) -> torch.Tensor:
        """Return what rounding lost."""
        return value - self.weight


class Residual(Naive):
    """Eight bits per weight: the rounding error, with a range slightly larger than the largest such error.

    The larger range gives hysteresis: a weight keeps its code, and a block its scale, until the master is
    clearly past the midpoint. If codes were always the nearest, storing a master that was just loaded could
    change some. A residual's unit is larger than most updates, so residuals are rounded stochastically: small
    updates take effect on average.
    """

    bytes_beside = 1.0

    def __init__(self, weight: torch.Tensor, form: Format, noise: Noise) -> None:
        first = unquantized(weight).clone()
        super().__init__(weight, form, noise)
        self.residual = torch.zeros_like(first, dtype=torch.int8)
        self.store(first)

    def load(self) -> torch.Tensor:
        """Add the residual to the weight."""
        value = torch.empty_like(self.residual, dtype=torch.float32)
        if self.in_triton:
            self._load_in_triton(value)
            return value
        for begin, end in self.blocks.chunks():
            rounded = self.blocks.of(self.weight, begin, end)
            residual = self.blocks.of(self.residual, begin, end)
            scales = self.blocks.form.scales_of(rounded)
            self.blocks.write(
                value, begin, end, rounded + residual * units(rounded, scales, self.blocks.form)
            )
        return value

    def store(self, value: torch.Tensor) -> None:
        """Keep code and scale if the residual can represent the difference, otherwise round to nearest."""
        self.blocks.noise.begin()
        if self.in_triton:
            self._store_in_triton(value)
            return
        form = self.blocks.fit(value)
        for begin, end in self.blocks.chunks():
            wide, rounded = (self.blocks.of(each, begin, end) for each in (value, self.weight))
            noise, _ = self.blocks.noise_for(begin, end)
            rounded, parts = follow(wide, rounded, form, noise)
            self.blocks.write(self.weight, begin, end, rounded)
            self.blocks.write(self.residual, begin, end, parts)

    def _load_in_triton(self, value: torch.Tensor) -> None:
        from nanotrain_fp4_master import triton_nvfp4

        for begin, end in self.blocks.chunks():
            ranges = (read_range(each, begin, end) for each in (self.weight, self.residual, value))
            triton_nvfp4.load(*ranges)

    def _store_in_triton(self, value: torch.Tensor) -> None:
        from nanotrain_fp4_master import triton_nvfp4

        noise, largest = self.blocks.noise, largest_of(value)
        first, key = first_of(noise.piece) or 0, noise.key
        for begin, end in self.blocks.chunks():
            wide, rounded, residual = (
                read_range(each, begin, end) for each in (value, self.weight, self.residual)
            )
            triton_nvfp4.store(wide, rounded, residual, largest, first + begin, key)
            write_range(self.weight, begin, end, rounded)

    @property
    def in_triton(self) -> bool:
        """Whether the kernels can load and store this weight."""
        return first_of(self.blocks.noise.piece) is not None and in_triton(self.residual, self.blocks.form)

    def state(self) -> Mapping[str, torch.Tensor]:
        """Return the residual."""
        return {"residual": self.residual}


def units(rounded: torch.Tensor, scales: torch.Tensor, form: Format) -> torch.Tensor:
    """Return the unit of each weight's residual, rounded to bfloat16; 0 in blocks of zeros.

    It has so few significant bits that sums and products of it in float32 add no rounding error.
    """
    return (form.half_gap(rounded / nonzero(scales)) * quotient(scales, PARTS)).bfloat16().float()


def residual_of(
    wide: torch.Tensor, rounded: torch.Tensor, form: Format, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``wide - rounded`` in units, rounded stochastically to whole ones, and the unit itself.

    Both are 0 in blocks of zeros.
    """
    scales = form.scales_of(rounded)
    unit, empty = units(rounded, scales, form), (scales == 0).float()
    return (wide - rounded).div_(unit + empty).add_(noise).floor_().mul_(1 - empty), unit


def follow(
    wide: torch.Tensor, old: torch.Tensor, form: Format, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rounded blocks [N, B] for masters ``wide``, and their residuals, given the previous ``old``.

    A weight that is still the nearest to its master, or almost, is unchanged; other weights of its block are
    rounded to nearest with the same scale. A block gets a new scale if a residual would be out of range, or
    if the scale no longer fits the block's largest weight. All decisions use the values that would be read
    back, so that storing these again gives the same result.
    """
    scales = form.scales_of(old)
    divisor = nonzero(scales)
    parts, unit = residual_of(wide, old, form, noise)
    near = torch.addcmul(old, parts, unit, value=1 - SLACK)
    stays = on_grid(form.nearest(near.div_(divisor)), scales) == old
    moved = torch.where(stays, old, on_grid(form.nearest(wide / divisor), scales))
    parts, unit = residual_of(wide, moved, form, noise)
    back = torch.addcmul(moved, parts, unit)
    fit = back.abs().amax(dim=1, keepdim=True) / divisor
    keeps = (parts.abs().amax(dim=1, keepdim=True) <= REACH) & form.has(scales)
    keeps &= (fit > form.fits[0]) & (fit < form.fits[1])
    if wide.device.type == "cpu" and bool(keeps.all()):  # nearly always; on a GPU it would synchronize
        return moved, parts
    rounded = torch.where(keeps, moved, to_nearest(wide, form))
    return rounded, residual_of(wide, rounded, form, noise)[0].clamp_(-REACH, REACH)
