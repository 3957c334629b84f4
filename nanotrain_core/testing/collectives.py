"""Records every collective and message of this rank, in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

#: The operator, the ranks of its group, the tensors' shapes and dtypes (of an all-to-all without axis
#: 0, whose length is each rank's own).
Entry = tuple[str, tuple[int, ...], tuple[str, ...]]


class CollectiveLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, appends each ``c10d`` operator to ``entries``, including those of backward hooks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[Entry] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            skip = 1 if func.__name__.startswith("alltoall") else 0
            self.entries.append((func.__name__, _group(args), tuple(_tensors(args, skip))))
        return func(*args, **(kwargs or {}))


def _group(args: Sequence[Any]) -> tuple[int, ...]:
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            try:
                group = dist.ProcessGroup.unbox(argument)
            except RuntimeError:  # another kind of object, such as the reduce operation
                continue
            return tuple(dist.get_process_group_ranks(group))
    return ()


def _tensors(value: Any, skip: int) -> list[str]:
    """Describe all tensors in ``value``, without the sizes of their first ``skip`` axes."""
    if isinstance(value, torch.Tensor):
        return [f"{str(value.dtype).removeprefix('torch.')}{list(value.shape[skip:])}"]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _tensors(item, skip)]
    return []
