"""Masters of bfloat16 weights: the parameter is the upper half of a float32 number, the master the lower.

A float32 number consists of the 16 bits of a bfloat16 number and 16 more. Storing all of these 16 bits is
exact; storing eight of them gives a master with 15 bits of mantissa. Both use integer arithmetic on the bits,
which as integers have the order of the magnitudes.

Source: the exact form is Transformer Engine's; eight bits beside bfloat16 are FlashOptim's, arXiv 2602.23349,
algorithm 1, here at 1/128 of half the distance between bfloat16 numbers in place of 1/127 so that it is
exact.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nanotrain_core.api.torch import ErrorFeedback, MasterWeight
from nanotrain_fp4_master.blocks import stochastic_round_bfloat16
from nanotrain_fp4_master.noise import Noise, chunks


def bits_of(value: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers as int32."""
    return value.contiguous().view(torch.int32)


def upper(weight: torch.Tensor) -> torch.Tensor:
    """Return the bits, as int32, of bfloat16 numbers converted to float32."""
    return weight.view(torch.int16).to(torch.int32) << 16


class Remainder(MasterWeight):
    """All 16 bits: the master is a float32 number, bit for bit.

    The parameter is that number rounded to nearest, with ties away from zero. With ties to even, the two
    midpoints next to an even number would have the same parameter and the same 16 bits of remainder.
    """

    bytes_beside = 2.0

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.remainder = torch.zeros_like(weight, dtype=torch.int16)

    def load(self) -> torch.Tensor:
        """Return the float32 master, joined from both halves."""
        return (upper(self.weight) + self.remainder).view(torch.float32)

    def store(self, value: torch.Tensor) -> None:
        """Split float32 ``value`` into the parameter and the remainder."""
        bits = bits_of(value)
        self.remainder.copy_(bits)  # the lower half, signed: negative if the magnitude was rounded up
        self.weight.view(torch.int16).copy_((bits + 2**15) >> 16)

    def state(self) -> Mapping[str, torch.Tensor]:
        """Return the lower half."""
        return {"remainder": self.remainder}


class Residual8(MasterWeight):
    """Eight bits: the error is at most 1/128 of half the spacing of bfloat16 numbers. The parameter is the
    master rounded to nearest."""

    bytes_beside = 1.0

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.residual = torch.zeros_like(weight, dtype=torch.int8)

    def load(self) -> torch.Tensor:
        """Put both together."""
        return (upper(self.weight) + (self.residual.to(torch.int32) << 8)).view(torch.float32)

    def store(self, value: torch.Tensor) -> None:
        """Round ``value`` into the parameter; store the error in eight bits, below half the spacing."""
        self.weight.copy_(value)
        lost = bits_of(value) - upper(self.weight)
        self.residual.copy_(((lost + 2**7) >> 8).clamp_(-127, 127))

    def state(self) -> Mapping[str, torch.Tensor]:
        """Return the eight bits."""
        return {"residual": self.residual}


class Naive(MasterWeight):
    """Nothing: updates below half the distance between bfloat16 numbers are lost."""

    bytes_beside = 0.0

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def load(self) -> torch.Tensor:
        """Widen the parameter."""
        return self.weight.float()

    def store(self, value: torch.Tensor) -> None:
        """Round."""
        self.weight.copy_(value)

    def state(self) -> Mapping[str, torch.Tensor]:
        """Nothing."""
        return {}


class Eco(Naive, ErrorFeedback):
    """No master bits: rounding is stochastic, and the optimizer carries the error in its momentum."""

    def __init__(self, weight: torch.Tensor, noise: Noise) -> None:
        super().__init__(weight)
        self.noise = noise

    def store(self, value: torch.Tensor) -> None:
        """Round stochastically to one of the two nearest numbers: the expected result is ``value``."""
        self.noise.begin()
        flat, weight = value.reshape(-1), self.weight.view(-1)
        for begin, end in chunks(flat):
            threshold = (self.noise.weights(begin, end) * 2**16).int()
            weight[begin:end] = stochastic_round_bfloat16(flat[begin:end], threshold)

    def error(self, value: torch.Tensor) -> torch.Tensor:
        """Return what rounding lost."""
        return value - self.weight
