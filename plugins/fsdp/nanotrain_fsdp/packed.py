"""Packed weights in shards: ``fully_shard`` cuts, gathers and frees their rows, as they are stored.

torch treats a tensor that has ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` as what these return. All
else that it does with a parameter are views of whole rows, new memory, and a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from nanotrain_core.api.torch import RANGE, PackedWeight

aten = torch.ops.aten

#: Operations that torch cuts and pads a shard with.
VIEWS = {aten.view.default, aten.as_strided.default, aten.slice.Tensor, aten.split.Tensor}
NEW = {aten.new_empty.default, aten.new_zeros.default}


class PackedShard(PackedWeight):
    """A packed weight that is not trained, or a range of its rows. Views and new tensors are packed, too."""

    sent: torch.Tensor
    """The rows that this rank sends: its own, and padding up to those of other ranks."""

    def __new__(cls, *args: Any) -> PackedShard:
        """Take what :class:`PackedWeight` does."""
        self: PackedShard = super().__new__(cls, *args)  # type: ignore[assignment]
        self.sent = self.rows
        return self

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], None]:
        """Return what ranks gather. With more arguments torch would expect it in the shape of the shard."""
        return (self.sent,), None

    def fsdp_post_all_gather(
        self,
        gathered: Sequence[torch.Tensor],
        metadata: None,
        dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Return the weight that has the rows of all ranks, or None: they are in the memory of ``out``."""
        if out is not None:
            return None
        (rows,) = gathered
        return self._sharing(rows, (len(rows) * RANGE,), 0), ()

    def _sharing(self, rows: torch.Tensor, shape: tuple[int, ...], first: int) -> PackedShard:
        found: PackedShard = super()._sharing(rows, shape, first)  # type: ignore[assignment]
        found.sent = self.sent
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Return packed tensors from what torch calls to make shards."""
        first, rest = args[0], args[1:]
        if isinstance(first, cls):
            if func in VIEWS:
                alike = func(torch.empty(first.shape, device="meta"), *rest, **(kwargs or {}))
                several = alike if isinstance(alike, list) else [alike]
                if all(map(first._has_whole_rows, several)):
                    found = [first._view(each) for each in several]
                    return found if isinstance(alike, list) else found[0]
            if func in NEW:
                return first._new(tuple(rest[0]), first.device)
            if func is aten.empty_like.default:
                return first._new(tuple(first.shape), (kwargs or {}).get("device") or first.device)
            if func is aten.copy_.default and isinstance(rest[0], cls) and rest[0].shape == first.shape:
                first.rows.copy_(rest[0].rows)  # of one weight, so of one format
                increment_version(first.rows)  # which torch does not in here
                return first
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _has_whole_rows(self, view: torch.Tensor) -> bool:
        """Return whether a view of a plain tensor of this shape would be of whole rows here."""
        begin, end = view.storage_offset(), view.storage_offset() + view.numel()
        return view.is_contiguous() and not begin % RANGE and (not end % RANGE or end == self.numel())

    def _view(self, alike: torch.Tensor) -> PackedShard:
        """Return the view of this weight that lies in it as ``alike`` does in a plain tensor."""
        begin = int(alike.storage_offset())
        end = begin + alike.numel()
        return self._sharing(self._rows(begin, end), tuple(alike.shape), self.first + begin)

    def _new(self, shape: tuple[int, ...], device: torch.device) -> PackedShard:
        """Return a weight of this format; one with this shard's padding has its memory.

        ``fully_shard`` pads when memory is allocated, and again before the first pass: it would then use
        other memory than the run.
        """
        count = -(-prod(shape) // RANGE)
        if device == self.device and len(self.rows) < count == len(self.sent):
            return self._sharing(self.sent, shape, 0)
        rows = torch.zeros(count, self.packing.width, dtype=torch.uint8, device=device)
        return PackedShard(rows, self.packing, shape, self.dtype, self.original)


def cut_in_rows(weight: torch.Tensor, ranks: int) -> bool:
    """Return whether each of several ranks gets a part of a packed weight, and of whole stored rows."""
    chunk = -(-len(weight) // ranks)
    numel = weight.numel() // len(weight)
    return chunk * (ranks - 1) < len(weight) and not chunk * numel % RANGE and not weight.numel() % RANGE


def let_shard(part: nn.Module) -> None:
    """Make the packed parameters of a part, on ``meta``, such that ``fully_shard`` takes frozen ones."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in part.modules():
        for name, each in [*module.named_parameters(recurse=False)]:
            if isinstance(each, PackedWeight) and not each.requires_grad:
                if each not in made:
                    shard = PackedShard(each.rows, each.packing, tuple(each.shape), each.dtype, each.original)
                    made[each] = nn.Parameter(shard, requires_grad=False)
                setattr(module, name, made[each])
