"""What is made of a tensor once and used several times: of weights in a step, of inputs by several layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch

from nanotrain_core.precision.gemm import steady

T = TypeVar("T")


class MadeOnce(Generic[T]):
    """Makes something of each weight once in a pass of the core's executor, and anew outside of one.

    Weights are told apart by where they lie, not by the object: one that is recomputed for its backward pass
    has a new object each time, which may come to lie where that of another weight was. Each is held on to.
    """

    def __init__(self, make: Callable[[torch.Tensor], T]) -> None:
        self.make = make
        self._pass: int | None = None
        self._made: dict[Hashable, tuple[torch.Tensor, int, T]] = {}

    def __call__(self, weight: torch.Tensor) -> T:
        """Return what was made of ``weight``."""
        now = steady()
        if now is None:
            return self.make(weight)
        if now != self._pass:
            self._made.clear()
            self._pass = now
        key = (weight.data_ptr(), weight.shape, weight.stride(), weight.dtype)
        _, version, made = self._made.get(key, (None, None, None))
        if made is None or version != weight._version:
            made = self.make(weight)
            self._made[key] = weight.detach(), weight._version, made
        return made


class Last(Generic[T]):
    """Remembers what was made of the last tensor: queries, keys and values read one input, as gates do.

    It holds on to that tensor, so that no other can come to lie at its place.
    """

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._held: torch.Tensor | None = None
        self._made: T | None = None

    def get(self, x: torch.Tensor, how: Any, make: Callable[[], T]) -> T:
        """Return what was made of ``x``, unchanged since, in the way ``how``; else make it."""
        key = (x.data_ptr(), x.shape, x.stride(), x.dtype, x._version, steady(), how)
        if self._made is None or key != self._key:
            self._made = None  # free it before there is another
            self._made, self._held, self._key = make(), x, key
        return self._made
