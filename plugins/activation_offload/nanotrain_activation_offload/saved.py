"""What one forward pass of one layer saved for backward, on its way to the host and back.

A layer's tensors leave as they are saved. In backward the first that is wanted brings back all of its layer's
and all of the layer before it, which backward reaches next: copies run one layer ahead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nanotrain_activation_offload.host_memory import HostMemory

#: Dtypes of activations. Eight bits may be codes of a quantized weight, which its layer keeps anyway.
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


CHANGED = (
    "a tensor that is needed for gradients was changed in place after an operation had saved it; "
    "without activation offload torch refuses this as well"
)


class Kept:
    """A tensor that stays on the device. Autograd compares versions only where no hook packs tensors."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.version = tensor._version
        self.kept = tensor.detach()  # with its history it would keep the operation alive that made it

    def tensor(self) -> torch.Tensor:
        """Return it.

        Raises:
            RuntimeError: it was changed in place since.
        """
        if self.kept._version != self.version:
            raise RuntimeError(CHANGED)
        return self.kept


class Region:
    """Consecutive elements of a storage, which several saved tensors may be views of: copied once."""

    def __init__(self, memory: HostMemory, saved: torch.Tensor) -> None:
        self.memory = memory
        self.version = saved._version
        self.saved: torch.Tensor | None = saved.detach()
        """Until the layer's forward pass is over: whether it was changed shows in this alone."""
        flat_N = self.saved.as_strided((saved.numel(),), (1,))
        self.storage = StorageWeakRef(flat_N.untyped_storage())  # type: ignore[no-untyped-call]
        self.copied: Any = self.memory.copy_out(flat_N)
        self._take: Callable[[], torch.Tensor] | None = None

    def check(self) -> None:
        """Compare versions, and let the device's memory go.

        Raises:
            RuntimeError: it was changed in place: its copy may have been under way.
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
    """What autograd keeps in the place of a tensor."""

    def __init__(self, region: Region, tensor: torch.Tensor) -> None:
        self.region, self.size, self.stride = region, tensor.shape, tensor.stride()

    def tensor(self) -> torch.Tensor:
        """Return the tensor, on the device."""
        return self.region.take().as_strided(self.size, self.stride)


class SavedByLayer:
    """Of one forward pass of one layer."""

    def __init__(
        self, memory: HostMemory, least: float, weights: Collection[int], before: SavedByLayer | None
    ) -> None:
        """Nothing is saved yet.

        Args:
            memory: what copies.
            least: bytes of a tensor that is worth a copy.
            weights: addresses of storages that stay on the device.
            before: of the layer before, in the same pass of a microbatch.
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
        # Memory of a tensor that has left may be another's by now, at the same address.
        if region is None or region.storage.expired():  # type: ignore[no-untyped-call]
            region = self.regions[key] = Region(self.memory, tensor)
        return View(region, tensor)

    def unpack(self, kept: View | Kept) -> torch.Tensor:
        """Return the tensor that was saved, and begin with the next ones.

        Raises:
            RuntimeError: it was changed in place since.
        """
        self.bring_back()
        return kept.tensor()

    def check(self) -> None:
        """Compare versions of what has left, at the end of the layer's forward pass, and free it.

        Raises:
            RuntimeError: a tensor that was saved was changed in place.
        """
        for region in list(self.regions.values()):
            region.check()

    def leaves(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is a large activation: of the device, no weight, and dense in memory."""
        return (
            type(tensor) is torch.Tensor
            and tensor.dtype in DTYPES
            and tensor.device.type == self.memory.device.type
            and tensor.numel() * tensor.element_size() >= max(self.least, 1)
            and place_of(tensor) not in self.weights
            and is_dense(tensor)
        )

    def bring_back(self) -> None:
        """Begin to copy back what is there, and after it what the layer before saved."""
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
    """Return what tells a tensor's memory from that of others; on ``meta`` none has an address."""
    storage = tensor.untyped_storage()
    return storage._cdata if tensor.is_meta else storage.data_ptr()


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor fill as much memory, in whatever order, each once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
