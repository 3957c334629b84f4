"""The numbers of small integer tensors in a dry run, so that code that reads counts from the device can.

A mixture of experts asks how many rows each expert got before it sends them. Tensors on ``meta`` have no
numbers, so those of small integer tensors are computed beside, on the CPU, by the same operators. One rule is
the planner's own: counting what a router chose gives every expert the same, since a router that is balanced
is what a plan assumes. All ranks are taken to hold the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from nanotrain_core.api.torch import encode_metadata, shard_range

#: Elements of a tensor whose numbers are followed.
MOST = 2**16

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)


class Values:
    """Numbers of tensors on ``meta``, as far as they are known."""

    def __init__(self) -> None:
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.messages: dict[tuple[int, ...], tuple[torch.dtype, torch.Size]] = {}
        """What pipeline stages send, by the shape of the batch's tokens: a description of it is all that a
        message says ahead of it."""
        self._described = False
        """Whether a pipeline stage has sent the description of a message, which follows."""
        self.tokens: tuple[int, ...] = ()
        """That shape, of the microbatch under way: the last ones of a step may be smaller than others."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the numbers of a tensor, on the CPU, or None."""
        found: torch.Tensor | None = self._known.get(tensor)  # type: ignore[no-untyped-call]
        return found

    def learn(self, tensor: torch.Tensor, numbers: torch.Tensor) -> None:
        """Note the numbers of a tensor."""
        self._known[tensor] = numbers

    def read(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Return what copies a tensor to the host, or None if ``func`` does no such thing."""
        tensor = args[0] if args else None
        if not isinstance(tensor, torch.Tensor) or not tensor.is_meta:
            return None
        device = kwargs.get("device")
        if func is torch.ops.aten._to_copy.default and device is not None and device.type == "cpu":
            known = self.of(tensor)
            if known is None:
                raise NotImplementedError(
                    f"a step reads {str(tensor.dtype)[6:]} {list(tensor.shape)} on the host; "
                    "a dry run knows counts of balanced experts alone"
                )
            return known.to(kwargs.get("dtype") or known.dtype)
        return None

    def scalar(self, tensor: torch.Tensor) -> Any:
        """Return what ``tensor.item()`` is: of unknown numbers 1, and no to whether something is wrong."""
        known = self.of(tensor)
        if known is None:
            return False if tensor.dtype == torch.bool else torch.ones((), dtype=tensor.dtype).item()
        return known.item()

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compute the numbers of ``out``, what ``func`` returned, if those of its arguments are known."""
        if not isinstance(out, torch.Tensor) or out.dtype not in INTEGERS or out.numel() > MOST:
            return
        numbers = self._counted(func, args) if func is torch.ops.aten.scatter_add.default else None
        if numbers is None:
            numbers = self._computed(func, args, kwargs)
        if numbers is not None and numbers.shape == out.shape:
            self.learn(out, numbers)

    def _counted(self, func: Any, args: Any) -> torch.Tensor | None:
        """Return equal counts for a ``scatter_add`` by an index that nobody knows."""
        into, _, index, added = args
        before = self.of(into)
        if before is None or before.dim() != 1 or self.of(index) is not None:
            return None
        total = added.numel()
        bounds = [shard_range(total, expert, len(before)) for expert in range(len(before))]
        return before + torch.tensor([stop - start for start, stop in bounds], dtype=before.dtype)

    def _computed(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        flat, spec = tree_flatten((args, kwargs))
        known = []
        for each in flat:
            if isinstance(each, torch.Tensor) and each.is_meta:
                each = self.of(each)  # noqa: PLW2901
                if each is None:
                    return None
            known.append(torch.device("cpu") if isinstance(each, torch.device) else each)
        if func._schema.name in ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided"):
            return None
        args, kwargs = tree_unflatten(known, spec)
        result = func(*args, **kwargs)
        return result if isinstance(result, torch.Tensor) else None

    # --- between ranks --------------------------------------------------------------------------

    def exchanged(self, name: str, args: Any) -> None:
        """Note what an all-to-all of counts brings, and what a description of a message says."""
        if name == "alltoall_base_" and not args[3]:
            out, sent = args[0], self.of(args[1])
            if sent is not None:
                group = dist.ProcessGroup.unbox(args[2])
                rank, size = dist.get_rank(group), dist.get_world_size(group)
                mine = sent.view(size, -1)[rank]
                self.learn(out, mine.repeat(size).view(out.shape))
        elif name == "send" and args[0][0].dtype == torch.int64:
            self._described = True
        elif name == "send" and self._described:
            self.messages[self.tokens] = args[0][0].dtype, args[0][0].shape
            self._described = False
        elif name == "recv_" and args[0][0].dtype == torch.int64 and self.tokens in self.messages:
            self._describe(args[0][0])

    def _describe(self, header: torch.Tensor) -> None:
        """Note what the next stage reads ahead of its first message."""
        dtype, shape = self.messages[self.tokens]
        self.learn(header, encode_metadata(torch.empty((), dtype=dtype).expand(shape)))
