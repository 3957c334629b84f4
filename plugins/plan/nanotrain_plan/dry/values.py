"""The numbers of small integer tensors in a dry run, so that code that reads counts from the device can.

A mixture of experts asks how many rows each expert got before it sends them. Tensors on ``meta`` have no
numbers, so those of small integer tensors are computed beside, on the CPU, by the same operators. One rule is
the planner's own: counting what a router chose gives every expert the same, since a router that is balanced
is what a plan assumes. Where ranks cannot split a batch evenly, others count rows in proportion to their
tokens. All else is the same on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from nanotrain_core.api import Layout, NanotrainError, View
from nanotrain_core.api.torch import encode_metadata, shard_range

#: Elements of a tensor whose numbers are followed.
MOST = 2**16

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)


@attrs.define(frozen=True, eq=False)
class Numbers:
    """The numbers of a tensor, on the CPU."""

    own: torch.Tensor
    """On the rank of the dry run."""
    elsewhere: Callable[[int], torch.Tensor] | None = None
    """Returns those on a rank; None: they are the same on all."""

    def at(self, rank: int) -> torch.Tensor:
        """Return the numbers on a rank."""
        return self.own if self.elsewhere is None else self.elsewhere(rank)


def _divided(total: int, among: torch.Tensor) -> torch.Tensor:
    """Return equal parts of a number, as many as ``among`` has elements, in its dtype."""
    bounds = [shard_range(total, number, len(among)) for number in range(len(among))]
    return torch.tensor([stop - start for start, stop in bounds], dtype=among.dtype)


def _dims_of(ranks: Sequence[int], layout: Layout) -> tuple[View, list[str]]:
    """Return the dimensions along which the ranks of a group differ, and their view, experts' first."""
    for view in reversed(layout.views.values()):
        dims = [dim for dim in view.dims if len({view.coordinate(rank, dim) for rank in ranks}) > 1]
        if view.ranks(ranks[0], dims) == tuple(ranks):
            return view, dims
    raise NanotrainError(f"ranks {ranks} exchange counts; expected ranks along dimensions of the layout")


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
        self.layout: Layout | None = None
        """Of the run."""
        self.tokens_of: Callable[[int], int] | None = None
        """With how many tokens experts are called in that microbatch, by rank; None: as many on all."""

    def _get(self, tensor: torch.Tensor) -> Numbers | None:
        found: Numbers | None = self._known.get(tensor)  # type: ignore[no-untyped-call]
        return found

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the numbers of a tensor, on the CPU, or None."""
        found = self._get(tensor)
        return None if found is None else found.own

    def learn(self, tensor: torch.Tensor, numbers: torch.Tensor | Numbers) -> None:
        """Note the numbers of a tensor."""
        self._known[tensor] = Numbers(numbers) if isinstance(numbers, torch.Tensor) else numbers

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
        if numbers is not None and numbers.own.shape == out.shape:
            self.learn(out, numbers)

    def _counted(self, func: Any, args: Any) -> Numbers | None:
        """Return equal counts for a ``scatter_add`` by an index that nobody knows."""
        into, _, index, added = args
        before = self._get(into)
        if before is None or before.own.dim() != 1 or self.of(index) is not None:
            return None
        total, tokens = added.numel(), self.tokens_of
        own = before.own + _divided(total, before.own)
        mine = 0 if tokens is None else tokens(dist.get_rank())
        if tokens is None or not mine:
            return Numbers(own)
        return Numbers(own, lambda rank: before.at(rank) + _divided(total * tokens(rank) // mine, before.own))

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Numbers | None:
        flat, spec = tree_flatten((args, kwargs))
        known: list[Any] = []
        for each in flat:
            if isinstance(each, torch.Tensor) and each.is_meta:
                known.append(self._get(each))
                if known[-1] is None:
                    return None
            else:
                known.append(torch.device("cpu") if isinstance(each, torch.device) else each)
        if func._schema.name in ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided"):
            return None

        def result(numbers: Callable[[Numbers], torch.Tensor]) -> Any:
            found = [numbers(each) if isinstance(each, Numbers) else each for each in known]
            args, kwargs = tree_unflatten(found, spec)
            return func(*args, **kwargs)

        own = result(lambda each: each.own)
        if not isinstance(own, torch.Tensor):
            return None
        if all(each.elsewhere is None for each in known if isinstance(each, Numbers)):
            return Numbers(own)
        return Numbers(own, cache(lambda rank: result(lambda each: each.at(rank))))

    # --- between ranks --------------------------------------------------------------------------

    def exchanged(self, name: str, args: Any) -> None:
        """Note what an all-to-all of counts brings, and what a description of a message says."""
        if name == "alltoall_base_" and not args[3]:
            out, sent = args[0], self._get(args[1])
            if sent is not None:
                ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(args[2]))
                self.learn(out, self._received(sent, ranks, out.shape))
        elif name == "send" and args[0][0].dtype == torch.int64:
            self._described = True
        elif name == "send" and self._described:
            self.messages[self.tokens] = args[0][0].dtype, args[0][0].shape
            self._described = False
        elif name == "recv_" and args[0][0].dtype == torch.int64 and self.tokens in self.messages:
            self._describe(args[0][0])

    def _received(self, sent: Numbers, ranks: Sequence[int], shape: torch.Size) -> Numbers:
        """Return what an all-to-all of equal parts brings, of what these ranks send."""

        def at(rank: int, ranks: Sequence[int]) -> torch.Tensor:
            index = ranks.index(rank)
            return torch.cat([sent.at(each).view(len(ranks), -1)[index] for each in ranks]).view(shape)

        own = at(dist.get_rank(), ranks)
        if sent.elsewhere is None or self.layout is None:
            return Numbers(own)
        view, dims = _dims_of(ranks, self.layout)
        return Numbers(own, cache(lambda rank: at(rank, view.ranks(rank, dims))))

    def _describe(self, header: torch.Tensor) -> None:
        """Note what the next stage reads ahead of its first message."""
        dtype, shape = self.messages[self.tokens]
        self.learn(header, encode_metadata(torch.empty((), dtype=dtype).expand(shape)))
