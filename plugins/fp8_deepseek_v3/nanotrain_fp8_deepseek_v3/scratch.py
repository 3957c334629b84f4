"""What is made of a tensor once and used several times: of weights in a step, of inputs by several layers.

It belongs to one run, whose passes say how long what was made of a weight holds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch

from nanotrain_core.api.torch import Kept, Passes

T = TypeVar("T")


class Scratch:
    """What the backends of one run share."""

    def __init__(self, passes: Passes | None = None) -> None:
        """``passes``: of the run; None: outside of one, where whatever is asked for is made anew."""
        self.passes = passes or Passes()
        self.inputs: Last[tuple[torch.Tensor, Kept]] = Last(self.passes)
        """The last input, as it is multiplied, and what was kept of it."""
        self.transposed: Last[list[torch.Tensor]] = Last(self.passes)
        """The last input that was kept, as it is multiplied for the gradients of weights."""

    def once(self, make: Callable[[torch.Tensor], T]) -> MadeOnce[T]:
        """Return what makes something of each weight once in a step."""
        return MadeOnce(make, self.passes)


class MadeOnce(Generic[T]):
    """Makes something of each weight once while weights stand still, and anew at any other time.

    Weights are told apart by where they lie, not by the object: one that is recomputed for its backward pass
    has a new object each time, which may come to lie where that of another weight was. Each is held on to.
    """

    def __init__(self, make: Callable[[torch.Tensor], T], passes: Passes) -> None:
        self.make, self.passes = make, passes
        self._since: int | None = None
        self._made: dict[Hashable, tuple[torch.Tensor, int, T]] = {}

    def __call__(self, weight: torch.Tensor) -> T:
        """Return what was made of ``weight``."""
        now = self.passes.weights_version
        if now is None:
            return self.make(weight)
        if now != self._since:
            self._made.clear()
            self._since = now
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

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self._key: tuple[Any, ...] | None = None
        self._held: torch.Tensor | None = None
        self._made: T | None = None

    def get(self, x: torch.Tensor, how: Any, make: Callable[[], T]) -> T:
        """Return what was made of ``x``, unchanged since, in the way ``how``; else make it."""
        since = self.passes.weights_version
        key = (x.data_ptr(), x.shape, x.stride(), x.dtype, x._version, since, how)
        if self._made is None or key != self._key:
            self._made = None  # free it before there is another
            self._made, self._held, self._key = make(), x, key
        return self._made
