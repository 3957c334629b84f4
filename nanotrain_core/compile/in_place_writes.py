"""Refuses layers whose gradients a compiler gets wrong: those that read a tensor which they also write to.

A graph's backward pass may compute a part of forward again, from its inputs as they are by then. torch does
not notice that forward has changed one of them, such as a running maximum that scales the layer's input, and
returns wrong gradients. A tensor that is written and not read, as a statistic for the next step, is fine.

What a graph writes is known from the versions of its inputs, and whether its results depend on that from a
second run of the graph, without data, in which each tensor has the set of inputs from which it was computed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanotrain_core.errors import NanotrainError


class RefusesWrites:
    """A backend of ``torch.compile`` that compiles with another, and checks the first call of each graph."""

    def __init__(self, backend: str, layer: str, options: Mapping[str, Any] | None) -> None:
        self.__name__, self.layer = str(backend), layer
        self.compile: Callable[..., Callable[..., Any]] = torch._dynamo.lookup_backend(backend)
        self.options: dict[str, Any] = {}
        if options:
            self.options = {"config_patches" if backend == "inductor" else "options": dict(options)}

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile ``graph``."""
        names = [_name(node) for node in graph.graph.nodes if node.op == "placeholder"]
        unchecked = [graph]
        compiled = self.compile(graph, inputs, **self.options)

        def call(*args: Any) -> Any:
            if not unchecked:
                return compiled(*args)
            graph, before = unchecked.pop(), _versions(args)
            result = compiled(*args)
            changed = zip(before, _versions(args), strict=True)
            written = [n for n, (then, now) in enumerate(changed) if then != now]
            read = _read(graph, args, written) if written and torch.is_grad_enabled() else ()
            if read:
                raise NanotrainError(
                    f"run.compile: the forward of {self.layer} reads {names[min(read)]} and writes to it, "
                    "and a compiled or recomputed layer may run twice: update it outside of the layer, or "
                    "have the component whose code this is declare stays_eager"
                )
            return result

        return call


def _versions(args: Iterable[Any]) -> list[int]:
    return [x._version if isinstance(x, torch.Tensor) and not x.is_inference() else 0 for x in args]


def _name(node: fx.Node) -> str:
    """Return which tensor an input is: its place in the layer if torch tells it."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", node.name)
    name = name() if callable(name) else name  # of torch 2.11, a method
    name = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", name)
    return re.sub(r"^L\['args'\]\[0\]\.", "", name)


def _read(graph: fx.GraphModule, args: Sequence[Any], written: Iterable[int]) -> set[int]:
    """Return those of the inputs ``written`` that results of ``graph`` depend on."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        inputs = [_like(x) for x in args]
        with _Origins(inputs, written) as origins:
            try:
                results = tree_leaves(graph(*inputs))
            except Exception:  # operators that need values: what is not known is not refused
                return set()
    own = {n: _storage(inputs[n]) for n in written}
    found = ((n, x) for x in results if isinstance(x, torch.Tensor) for n in origins.of[_storage(x)])
    return {n for n, x in found if _storage(x) != own[n]}


def _like(x: Any) -> Any:
    """Return a tensor like ``x`` that shares no memory with others, as parameters in one buffer do."""
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _storage(x: torch.Tensor) -> int:
    storage: int = x.untyped_storage()._cdata
    return storage


class _Origins(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows which inputs each tensor has been computed from."""

    def __init__(self, inputs: Sequence[Any], numbers: Iterable[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.of: dict[int, set[int]] = defaultdict(set)
        """By storage: the numbers of inputs."""
        for n in numbers:
            self.of[_storage(inputs[n])].add(n)
        self._alive: list[Any] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        origins = {n for x in tensors for n in self.of[_storage(x)]}
        given = [*zip(operator._schema.arguments, args, strict=False)]
        given += [(each, kwargs[each.name]) for each in operator._schema.arguments if each.name in kwargs]
        into = [x for each, x in given if each.alias_info is not None and each.alias_info.is_write]
        for x in tree_leaves((result, into)):
            if isinstance(x, torch.Tensor):
                self.of[_storage(x)] |= origins
        self._alive.append(result)  # a storage that is freed could give another one its number
        return result
