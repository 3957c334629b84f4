"""Cache of results derived from a tensor: of weights within a step, of an input read by several layers.

It belongs to one run, whose passes determine how long a weight's result is valid. No addresses are compared:
a weight is identified by its parameter, an input by its storage, neither of which can be reused while it is
known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from nanotrain_core.api.torch import Passes

T = TypeVar("T")


class OperandCache:
    """The cache shared by the backends of one run."""

    def __init__(self, passes: Passes | None = None) -> None:
        """``passes``: of the run; None: outside a run, where everything is recomputed."""
        self.passes = passes or Passes()
        self.inputs: Last[Any] = Last(self.passes)
        """The last input, as it is multiplied, and what was saved of it."""
        self.transposed: Last[Any] = Last(self.passes)
        """The last saved input, as it is multiplied for the gradients of weights."""

    def once(self, make: Callable[[torch.Tensor], T]) -> MadeOnce[T]:
        """Return a cache that computes a result for each weight once per step."""
        return MadeOnce(make, self.passes)


class MadeOnce(Generic[T]):
    """Computes a result for each parameter once while weights are unchanged, otherwise at every call.

    For a tensor that is not a parameter it is recomputed each time: its object may be a temporary view.
    """

    def __init__(self, make: Callable[[torch.Tensor], T], passes: Passes) -> None:
        self.make, self.passes = make, passes
        self._since: int | None = None
        self._made: dict[int, tuple[torch.Tensor, int, T]] = {}
        """By the object's id, which is unique while the object is held here."""

    def __call__(self, weight: torch.Tensor) -> T:
        """Return the result for ``weight``."""
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
    """Caches the result for the last tensor: queries, keys and values read the same input, and so do gates.

    It keeps only the result alive, not the tensor. Tensors are identified by their storage and offset;
    a weak reference keeps the storage from being mistaken for that of another tensor.
    """

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self._key: tuple[Any, ...] | None = None
        self._storage: StorageWeakRef | None = None
        self._made: T | None = None

    def get(self, x: torch.Tensor, how: Any, make: Callable[[], T]) -> T:
        """Return the result for ``x``, if unchanged since and computed with ``how``; otherwise compute it."""
        if torch.compiler.is_compiling():
            return make()
        storage = StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
        place = x.storage_offset(), x.shape, x.stride(), x.dtype, x._version
        key = (storage.cdata, *place, self.passes.weights_version, how)
        if self._made is None or key != self._key:
            self._made = None  # free it before allocating another
            self._made, self._storage, self._key = make(), storage, key
        return self._made
