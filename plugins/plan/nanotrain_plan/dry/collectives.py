"""What a collective is to a recorder: read from the call that torch.distributed makes, dry or real.

Every collective and message of torch.distributed goes through an operator of the namespace ``c10d``, which a
``TorchDispatchMode`` sees, whatever asked for it and whatever the backend does with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist


@attrs.define(frozen=True, cache_hash=True)
class Collective:
    """One collective or message, as one rank took part in it."""

    op: str
    """``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``, ``send``, ``recv``
    and the like."""
    ranks: tuple[int, ...]
    """Global ranks of the process group; of a message the two that exchange it."""
    bytes: int
    """Of the tensor on this rank: the whole one of an all-reduce or a broadcast, what goes in of a
    reduce-scatter and an all-to-all, what comes out of an all-gather, what a message holds."""


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_bytes, tensors))


@attrs.define(frozen=True)
class _Form:
    """How to read the arguments of one operator."""

    op: str
    group: int
    """Which argument is the process group."""
    size: Callable[[Sequence[Any]], int]
    peer: int | None = None
    """Which argument is the other rank's number in the group."""


_FORMS = {
    "allreduce_": _Form("all_reduce", 1, lambda a: _bytes(a[0])),
    "broadcast_": _Form("broadcast", 1, lambda a: _bytes(a[0])),
    "reduce_": _Form("reduce", 1, lambda a: _bytes(a[0])),
    "allgather_": _Form("all_gather", 2, lambda a: _bytes(a[0])),
    "_allgather_base_": _Form("all_gather", 2, lambda a: _bytes(a[0])),
    "reduce_scatter_": _Form("reduce_scatter", 2, lambda a: _bytes(a[1])),
    "_reduce_scatter_base_": _Form("reduce_scatter", 2, lambda a: _bytes(a[1])),
    "gather_": _Form("gather", 2, lambda a: _bytes(a[1])),
    "scatter_": _Form("scatter", 2, lambda a: _bytes(a[0])),
    "alltoall_": _Form("all_to_all", 2, lambda a: _bytes(a[1])),
    "alltoall_base_": _Form("all_to_all", 2, lambda a: _bytes(a[1])),
    "send": _Form("send", 1, lambda a: _bytes(a[0]), peer=2),
    "recv_": _Form("recv", 1, lambda a: _bytes(a[0]), peer=2),
}


def read_collective(func: Any, args: Sequence[Any]) -> Collective | None:
    """Return the collective that an operator of ``c10d`` is; None of a barrier and the like.

    None also of the integers that describe a pipeline's messages, which travel once in a run.
    """
    form = _FORMS.get(func._schema.name.partition("::")[2])
    if form is None:
        return None
    group = dist.ProcessGroup.unbox(args[form.group])
    ranks = tuple(dist.get_process_group_ranks(group))
    if form.peer is not None:
        if args[0][0].dtype == torch.int64:
            return None
        ranks = tuple(sorted((dist.get_rank(), ranks[args[form.peer]])))
    return Collective(form.op, ranks, form.size(args))
