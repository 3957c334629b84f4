"""The tensors that one forward pass of one layer saves for backward: copied to the host, and back.

Tensors are copied to the host as they are saved. In backward the first use of one starts the copies of all
tensors of its layer, and of the layer before it, which backward reaches next: copies are one layer ahead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nanotrain_activation_offload.host_memory import HostMemory
from nanotrain_core.api.torch import storage_of

#: Dtypes of activations. Eight bits may be codes of a quantized weight, which its layer keeps anyway.
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


CHANGED = (
    "a tensor that is needed for gradients was changed in place after an operation had saved it; "
    "without activation offload torch refuses this as well"
)


class Kept:
    """A tensor that stays on the device. With pack hooks autograd does not check versions; this does."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.version = tensor._version
        self.kept = tensor.detach()  # otherwise it would keep the graph that made it alive

    def tensor(self) -> torch.Tensor:
        """Return it.

        Raises:
            RuntimeError: it was changed in place since.
        """
        if self.kept._version != self.version:
            raise RuntimeError(CHANGED)
        return self.kept


class Region:
    """A contiguous range of a storage: copied once, even if several saved tensors are views of it."""

    def __init__(self, memory: HostMemory, saved: torch.Tensor) -> None:
        self.memory = memory
        self.version = saved._version
        self.saved: torch.Tensor | None = saved.detach()
        """Kept until the layer's forward pass ends, since only its version shows whether it was changed."""
        flat_N = self.saved.as_strided((saved.numel(),), (1,))
        self.storage = StorageWeakRef(flat_N.untyped_storage())  # type: ignore[no-untyped-call]
        self.copied: Any = self.memory.copy_out(flat_N)
        self._take: Callable[[], torch.Tensor] | None = None

    def check(self) -> None:
        """Check the version, and release the device memory.

        Raises:
            RuntimeError: it was changed in place, possibly while it was being copied.
        """
        saved, self.saved = self.saved, None
        if saved is not None and saved._version != self.version:
            raise RuntimeError(CHANGED)

    def bring_back(self) -> None:
        """Begin to copy back, unless that was begun."""
        if self._take is None:
            self._take, self.copied = self.memory.copy_back(self.copied), None

    def take(self) -> torch.Tensor:
        """Return the elements [N], on the device."""
        self.bring_back()
        assert self._take is not None
        tensor = self._take()
        self._take = lambda: tensor  # a second view of it
        return tensor


class View:
    """The object that autograd saves in place of an offloaded tensor."""

    def __init__(self, region: Region, tensor: torch.Tensor) -> None:
        self.region, self.size, self.stride = region, tensor.shape, tensor.stride()

    def tensor(self) -> torch.Tensor:
        """Return the tensor, on the device."""
        return self.region.take().as_strided(self.size, self.stride)


class SavedByLayer:
    """The tensors saved in one forward pass of one layer."""

    def __init__(
        self, memory: HostMemory, least: float, weights: Collection[int], before: SavedByLayer | None
    ) -> None:
        """Nothing is saved yet.

        Args:
            memory: copies to the host and back.
            least: smallest size in bytes of a tensor that is offloaded.
            weights: storages that stay on the device, by :func:`places_of`.
            before: the tensors saved by the layer before, in the same pass of a microbatch.
        """
        self.memory, self.least, self.weights, self.before = memory, least, weights, before
        # Autograd alone keeps regions alive, and drops each with the node that saved it.
        self.regions: weakref.WeakValueDictionary[Any, Region] = weakref.WeakValueDictionary()
        self._came_back = False

    def pack(self, tensor: torch.Tensor) -> View | Kept:
        """Return what to keep for backward."""
        if not self.leaves(tensor):
            return Kept(tensor)
        key = (
            place_of(tensor),
            tensor.storage_offset(),
            tensor.numel(),
            tensor.dtype,
            tensor._version,
        )
        region = self.regions.get(key)
        # The memory of an offloaded tensor may have been reused for another one, at the same address.
        if region is None or region.storage.expired():  # type: ignore[no-untyped-call]
            region = self.regions[key] = Region(self.memory, tensor)
        return View(region, tensor)

    def unpack(self, kept: View | Kept) -> torch.Tensor:
        """Return the saved tensor, and begin to copy back those that backward needs next.

        Raises:
            RuntimeError: it was changed in place since.
        """
        self.bring_back()
        return kept.tensor()

    def check(self) -> None:
        """At the end of the forward pass, check versions of offloaded tensors; free their device memory.

        Raises:
            RuntimeError: a tensor that was saved was changed in place.
        """
        for region in list(self.regions.values()):
            region.check()

    def leaves(self, tensor: torch.Tensor) -> bool:
        """Return whether to offload ``tensor``: large, on the device, dense in memory, and not a weight."""
        return (
            type(tensor) is torch.Tensor
            and tensor.dtype in DTYPES
            and tensor.device.type == self.memory.device.type
            and tensor.numel() * tensor.element_size() >= max(self.least, 1)
            and place_of(tensor) not in self.weights
            and is_dense(tensor)
        )

    def bring_back(self) -> None:
        """Begin to copy back this layer's tensors, then those of the layer before it."""
        self._bring_own_back()
        if self.before is not None:
            self.before._bring_own_back()
            self.before = None

    def _bring_own_back(self) -> None:
        if self._came_back:
            return
        self._came_back = True
        for region in list(self.regions.values()):
            region.bring_back()


def place_of(tensor: torch.Tensor) -> int:
    """Return a key of a tensor's storage: its address, or on ``meta``, where there is none, its object's."""
    storage = tensor.untyped_storage()
    return storage._cdata if tensor.is_meta else storage.data_ptr()


def places_of(weight: torch.Tensor) -> Iterator[int]:
    """Yield the keys of a weight's storages: a packed weight or a DTensor has those of the tensors in it."""
    held = storage_of(weight)
    if hasattr(held, "__tensor_flatten__"):
        inside = (getattr(held, name) for name in held.__tensor_flatten__()[0])
        for tensor in inside:  # with a DTensor's there is its mesh
            yield from places_of(tensor) if isinstance(tensor, torch.Tensor) else ()
    else:
        yield place_of(held)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor fill memory without gap or overlap, in any order of axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
