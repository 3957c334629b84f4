"""What was made of a weight, kept for as long as the weight stands still: one step's microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from nanotrain_core.products import steady

T = TypeVar("T")


class MadeOnce(Generic[T]):
    """Makes something of each weight once in a pass of the core's executor, and anew outside of one."""

    def __init__(self, make: Callable[[torch.Tensor], T]) -> None:
        self.make = make
        self._pass: int | None = None
        self._made: dict[int, tuple[int, T]] = {}

    def __call__(self, weight: torch.Tensor) -> T:
        """Return what was made of ``weight``."""
        now = steady()
        if now is None:
            return self.make(weight)
        if now != self._pass:
            self._made.clear()
            self._pass = now
        version, made = self._made.get(id(weight), (None, None))
        if made is None or version != weight._version:
            made = self.make(weight)
            self._made[id(weight)] = weight._version, made
        return made
