"""Masters of bfloat16 weights: the parameter is the upper half of a float32 number, they keep the lower.

A float32 number is 16 bits of bfloat16 and 16 more, so *all* of it takes 16 bits beside the weight, and
eight of them give a master with 15 bits of mantissa. Both are arithmetic on the bits as integers, which
grow with the number.

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
    """Return bfloat16 numbers as the int32 of the same float32 numbers."""
    return weight.view(torch.int16).to(torch.int32) << 16


class Remainder(MasterWeight):
    """All 16 bits: the master is a float32 number, bit for bit.

    The parameter is that number rounded to nearest, but away from zero where it lies in the middle: sixteen
    bits cannot tell both middles beside an even number.
    """

    bytes_beside = 2.0

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.remainder = torch.zeros_like(weight, dtype=torch.int16)

    def load(self) -> torch.Tensor:
        """Put the halves together."""
        return (upper(self.weight) + self.remainder).view(torch.float32)

    def store(self, value: torch.Tensor) -> None:
        """Take them apart."""
        bits = bits_of(value)
        self.remainder.copy_(bits)  # the lower half, as a signed number: upwards the parameter is one more
        self.weight.view(torch.int16).copy_((bits + 2**15) >> 16)

    def state(self) -> Mapping[str, torch.Tensor]:
        """Return the lower half."""
        return {"remainder": self.remainder}


class Residual8(MasterWeight):
    """Eight bits: wrong by at most 1/128 of half the distance between bfloat16 numbers. The parameter is
    the master rounded to nearest."""

    bytes_beside = 1.0

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.residual = torch.zeros_like(weight, dtype=torch.int8)

    def load(self) -> torch.Tensor:
        """Put both together."""
        return (upper(self.weight) + (self.residual.to(torch.int32) << 8)).view(torch.float32)

    def store(self, value: torch.Tensor) -> None:
        """Round, and keep the nearest eight bits of what that loses, less than half the distance."""
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
    """Nothing: rounded up or down at random, and the optimizer carries the error in its momentum."""

    def __init__(self, weight: torch.Tensor, noise: Noise) -> None:
        super().__init__(weight)
        self.noise = noise

    def store(self, value: torch.Tensor) -> None:
        """Round to one of the two nearest so that the mean is ``value``."""
        self.noise.begin()
        flat, weight = value.reshape(-1), self.weight.view(-1)
        for begin, end in chunks(flat):
            threshold = (self.noise.weights(begin, end) * 2**16).int()
            weight[begin:end] = stochastic_round_bfloat16(flat[begin:end], threshold)

    def error(self, value: torch.Tensor) -> torch.Tensor:
        """Return what rounding lost."""
        return value - self.weight
