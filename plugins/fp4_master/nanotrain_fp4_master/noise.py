"""Random numbers that depend on the run's seed, the parameter, the step and the element, and on nothing else.

Each is a hash of a counter, so a rank computes only the numbers of its own elements: rounding is the same
with every layout, and on CPU and GPU.

Source: the finalizer of SplitMix64: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
Generators", 2014.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch

from nanotrain_core.api import CheckpointError
from nanotrain_core.api.torch import Piece, stream_seed

#: The odd number next to 2^64 over the golden ratio, and the two multipliers of the finalizer, as signed
#: integers.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
FIRST, SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def mix(z: torch.Tensor) -> torch.Tensor:
    """Scramble int64 numbers in place, each into another one."""
    for shift, factor in ((30, FIRST), (27, SECOND)):
        z.bitwise_xor_((z >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(factor)
    return z.bitwise_xor_((z >> 31).bitwise_and_(2**33 - 1))


def uniform(elements: torch.Tensor, key: int) -> torch.Tensor:
    """Return a float32 number in [0, 1) for each int64 of ``elements``.

    It is a multiple of 2^-16: a sum with a number below 128 keeps all of its bits, and is not rounded up.
    """
    mixed = mix(elements.mul(GOLDEN).add_(key))
    return (mixed >> 48).bitwise_and_(2**16 - 1).float().mul_(2.0**-16)


def stream(seed: int, name: str, step: int) -> int:
    """Return the key of one parameter's numbers in one step: a signed 64-bit integer."""
    return stream_seed(seed, f"rounding/{name}", step) * 2 - 2**63


def first_of(piece: Piece) -> int | None:
    """Return the row-major index of a piece's first element in the whole tensor, if the others follow it."""
    placement = piece.placement
    if placement.shape[1:] != placement.global_shape[1:]:
        return None
    before = placement.offset[0] * prod(placement.global_shape[1:]) if placement.shape else 0
    return before + (piece.span[0] if piece.span else 0)


def elements_of(piece: Piece, begin: int, end: int, device: torch.device) -> torch.Tensor:
    """Return, for elements ``begin`` to ``end`` of a piece, their row-major indices in the whole tensor."""
    placement, first = piece.placement, first_of(piece)
    if first is not None:
        return torch.arange(first + begin, first + end, device=device)
    first = piece.span[0] if piece.span else 0
    rest = torch.arange(first + begin, first + end, device=device)
    numbers, stride = torch.zeros_like(rest), 1
    axes = zip(placement.shape, placement.offset, placement.global_shape, strict=True)
    for size, offset, length in reversed(list(axes)):
        numbers.add_((rest % size).add_(offset).mul_(stride))
        rest, stride = rest // size, stride * length
    return numbers


def cut_blocks(piece: Piece, block: int) -> bool:
    """Return whether blocks of ``block`` elements, counted in the whole tensor, lie on several ranks."""
    placement = piece.placement
    shape, whole, offset = placement.shape, placement.global_shape, placement.offset
    begin, end = piece.span or (0, prod(shape))
    if begin % block or (end % block and end != prod(shape)):
        return True
    split = [axis for axis in range(len(shape)) if shape[axis] != whole[axis]]
    if not split:
        return False
    inner = split[-1]
    runs = [prod(whole[axis + 1 :]) * offset[axis] for axis in split]
    lengths = [prod(shape[inner:])] + ([prod(whole[inner:])] if inner else [])
    at_the_end = inner == 0 and offset[0] + shape[0] == whole[0]
    return any(start % block for start in runs) or (not at_the_end and any(n % block for n in lengths))


#: Elements that are rounded at a time: what is computed on the way fits a CPU's cache, or 300 MB of a GPU.
CHUNKS = {"cpu": 2**17, "cuda": 2**22}


def chunks(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield first and last element of chunks of whole blocks, as many as are rounded at a time."""
    size, length = CHUNKS.get(tensor.device.type, CHUNKS["cuda"]), tensor.numel()
    return ((begin, min(begin + size, length)) for begin in range(0, length, size))


class Clock:
    """State shared by all masters of a precision: the run's seed, and the number of steps taken.

    It has the interface of a loss scale, with a constant scale of 1, because the core updates the
    precision's loss scale in every step and saves it in checkpoints.
    """

    value = 1.0

    def __init__(self, weights: str = "") -> None:
        self.seed, self.step = 0, 0
        self.weights = weights
        """Format and block size. Checkpoints need it: names, dtypes and shapes of tensors do not show it."""

    def update(self, skipped: bool | torch.Tensor) -> None:
        """Count a step."""
        self.step += 1

    def meta(self) -> dict[str, Any]:
        """Return the number of steps, and what weights are rounded to."""
        return {"step": self.step, "weights": self.weights}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Restore the number of steps.

        Raises:
            CheckpointError: the saved weights have another format or block size: they would be rounded again.
        """
        there = meta.get("weights") or self.weights
        if there != self.weights:
            raise CheckpointError(
                f"the checkpoint's weights are {there}, this run's are {self.weights}: write "
                "precision.format and precision.block_size as they were, or start from its weights alone: "
                "--weights"
            )
        self.step = meta.get("step", 0)


class Noise:
    """The random numbers of one piece."""

    def __init__(self, piece: Piece, clock: Clock, device: torch.device) -> None:
        self.piece, self.clock, self.device = piece, clock, device
        self.step, self.turn = -1, 0

    def begin(self) -> None:
        """Use new random numbers from here on. Training calls it once per step; more calls are allowed."""
        self.turn = self.turn + 1 if self.step == self.clock.step else 0
        self.step = self.clock.step

    def weights(self, begin: int, end: int) -> torch.Tensor:
        """Return this step's number for each of these elements of the piece."""
        return uniform(elements_of(self.piece, begin, end, self.device), self.key)

    @property
    def key(self) -> int:
        """The key of this step's numbers of weights."""
        return self._stream("weight")

    def blocks(self, begin: int, end: int, block: int) -> torch.Tensor:
        """Return a number for each block, derived from the index of its first element."""
        return uniform(elements_of(self.piece, begin, end, self.device)[::block], self._stream("scale"))

    def _stream(self, use: str) -> int:
        return stream(self.clock.seed, f"{self.piece.placement.name}/{use}/{self.turn}", self.step)
