"""A stand-in for CUDA graphs on a CPU: operators are recorded, and replayed on the same tensors.

It has their properties that code can get wrong: capture changes no value, a replay runs no Python code, reads
and writes the memory that was captured, and overwrites its results; and a value must not be read by the host.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanotrain_core.compile import apply, captured_executor
from nanotrain_core.recipe import validate

#: Operators for which the host waits: for a value, or for the size of the result.
READS = {
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten.nonzero,
    torch.ops.aten.masked_select,
    torch.ops.aten._unique2,
    torch.ops.aten.unique_dim,
    torch.ops.aten.unique_consecutive,
}


class RecordedGraph(TorchDispatchMode):
    """Stands for :class:`~nanotrain_core.compile.captured_executor.CUDAGraph`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self._own: set[int] = set()
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def capture(self, work):
        with self, mock.patch.object(torch.Tensor, "tolist", _forbidden):
            found = work()
        for tensor, value in self._before.values():
            tensor.copy_(value)
        return found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.overloadpacket in READS:
            _forbidden()
        arguments = func._schema.arguments
        given = dict(zip((declared.name for declared in arguments), args, strict=False)) | kwargs
        written = [d.name for d in arguments if d.alias_info is not None and d.alias_info.is_write]
        for name in written:
            self._keep(given.get(name))
        result = func(*args, **kwargs)
        is_new = all(declared.alias_info is None for declared in func._schema.returns)
        outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)] if is_new else []
        self._own.update(x.untyped_storage().data_ptr() for x in outputs)
        if outputs or written:
            self.calls.append((func, args, kwargs, outputs))  # which keeps their memory theirs
        return result

    def _keep(self, given: Any) -> None:
        for tensor in filter(torch.is_tensor, tree_leaves(given)):
            storage = tensor.untyped_storage().data_ptr()
            if storage not in self._own and storage not in self._before:
                with torch._C._DisableTorchDispatch():
                    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                    self._before[storage] = whole, whole.clone()

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, outputs in self.calls:
            result = func(*args, **kwargs)
            if outputs:
                again = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
                for memory, value in zip(outputs, again, strict=True):
                    memory.copy_(value)


def _forbidden(*_: Any) -> None:
    """Fail as CUDA does."""
    raise RuntimeError("operation not permitted when stream is capturing")


@contextmanager
def counted_executors():
    """Yield the executors that capture, as runs make them."""
    made = []
    begin = captured_executor.CapturingExecutor.__init__

    def remember(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        made.append(self)

    with mock.patch.object(captured_executor.CapturingExecutor, "__init__", remember):
        yield made


@contextmanager
def recorded_graphs():
    """Let runs with ``cuda_graphs`` record operators of a CPU; yield the executors that capture."""
    with (
        mock.patch.object(apply, "not_captured", return_value=()),  # there is no GPU
        mock.patch.object(validate, "not_captured", return_value=()),
        mock.patch.object(captured_executor, "CUDAGraph", RecordedGraph),
        counted_executors() as made,
    ):
        yield made
