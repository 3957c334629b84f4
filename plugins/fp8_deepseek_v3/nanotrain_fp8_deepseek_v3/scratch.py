"""What is made of a tensor once and used several times: of weights in a step, of inputs by several layers.

It belongs to one run, whose passes say how long what was made of a weight holds. No address is compared: a
weight is its parameter, an input its storage, neither of which another can be taken for while it is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from nanotrain_core.api.torch import Passes

T = TypeVar("T")


class Scratch:
    """What the backends of one run share."""

    def __init__(self, passes: Passes | None = None) -> None:
        """``passes``: of the run; None: outside of one, where whatever is asked for is made anew."""
        self.passes = passes or Passes()
        self.inputs: Last[Any] = Last(self.passes)
        """The last input, as it is multiplied, and what was kept of it."""
        self.transposed: Last[Any] = Last(self.passes)
        """The last input that was kept, as it is multiplied for the gradients of weights."""

    def once(self, make: Callable[[torch.Tensor], T]) -> MadeOnce[T]:
        """Return what makes something of each weight once in a step."""
        return MadeOnce(make, self.passes)


class MadeOnce(Generic[T]):
    """Makes something of each parameter once while weights stand still, and anew at any other time.

    Of a tensor that is no parameter it is made anew each time: its object may be a passing view.
    """

    def __init__(self, make: Callable[[torch.Tensor], T], passes: Passes) -> None:
        self.make, self.passes = make, passes
        self._since: int | None = None
        self._made: dict[int, tuple[torch.Tensor, int, T]] = {}
        """By the object's number, which is no other's while the object is held here."""

    def __call__(self, weight: torch.Tensor) -> T:
        """Return what was made of ``weight``."""
        now = self.passes.weights_version
        if now is None or not isinstance(weight, nn.Parameter):
            return self.make(weight)
        if now != self._since:
            self._made.clear()
            self._since = now
        _, version, made = self._made.get(id(weight), (None, None, None))
        if made is None or version != weight._version:
            made = self.make(weight)
            self._made[id(weight)] = weight, weight._version, made
        return made


class Last(Generic[T]):
    """Remembers what was made of the last tensor: queries, keys and values read one input, as gates do.

    It keeps no tensor alive but what was made. Tensors are told apart by their storage and where in it they
    lie; a reference, which does not keep its memory, keeps the storage from becoming that of another tensor.
    """

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self._key: tuple[Any, ...] | None = None
        self._storage: StorageWeakRef | None = None
        self._made: T | None = None

    def get(self, x: torch.Tensor, how: Any, make: Callable[[], T]) -> T:
        """Return what was made of ``x``, unchanged since, in the way ``how``; else make it."""
        if torch.compiler.is_compiling():
            return make()
        storage = StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
        place = x.storage_offset(), x.shape, x.stride(), x.dtype, x._version
        key = (storage.cdata, *place, self.passes.weights_version, how)
        if self._made is None or key != self._key:
            self._made = None  # free it before there is another
            self._made, self._storage, self._key = make(), storage, key
        return self._made
