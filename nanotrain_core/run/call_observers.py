"""Observation of calls of a function of the models' table, such as attention, by monitors.

Every module that holds a table gets one in which the function first reports its arguments. Inside a
compiled graph an operator reports them, which torch traces as one node: identical layers keep sharing a
graph, and whether a monitor observes the call is known only to Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count
from math import isnan
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.types import Number

from nanotrain_core.models.ops import Ops, WrappedOp

Function = Callable[..., torch.Tensor]

_numbers = count()
_known: WeakValueDictionary[int, CallObservers] = WeakValueDictionary()


class CallObservers:
    """The observers of calls of one function of a run."""

    def __init__(self, tell: Callable[..., None], device: torch.device) -> None:
        """``tell`` is called with each call's arguments, in every pass of every step."""
        self.tell, self.number = tell, next(_numbers)
        self.seen = torch.zeros(1, device=device)
        """The reporting operator modifies this: without a side effect it would be removed from a graph."""
        self._before: list[tuple[nn.Module, Ops]] = []
        _known[self.number] = self

    def observe(self, name: str, modules: Iterable[nn.Module]) -> None:
        """Observe calls of the function ``name`` by any of ``modules``."""
        tables: dict[int, Ops] = {}
        for module in modules:
            ops = vars(module).get("ops")
            if not isinstance(ops, Ops):
                continue
            if id(ops) not in tables:  # one for all modules: several would each cause a graph
                tables[id(ops)] = replace(ops, **{name: self._noted(getattr(ops, name))})
            self._before.append((module, ops))
            module.ops = tables[id(ops)]  # type: ignore[assignment]

    def restore(self) -> None:
        """Restore the modules' original tables."""
        while self._before:
            module, ops = self._before.pop()
            module.ops = ops  # type: ignore[assignment]

    def _noted(self, function: Function) -> Function:
        if isinstance(function, WrappedOp):  # report what the inner function receives
            return WrappedOp(function.outer, self._noted(function.inner))
        number, seen, tell = self.number, self.seen, self.tell

        def noted(*args: Any) -> torch.Tensor:
            if torch.compiler.is_compiling():
                places = [n for n, x in enumerate(args) if isinstance(x, torch.Tensor)]
                rest = [float("nan") if x is None else x for x in args if not isinstance(x, torch.Tensor)]
                tell_from_graph(seen, number, [args[n].detach() for n in places], places, rest)
            else:
                tell(*args)
            return function(*args)

        return noted


@torch.library.custom_op("nanotrain::called", mutates_args={"seen"})
def tell_from_graph(
    seen: torch.Tensor, number: int, tensors: list[torch.Tensor], places: list[int], rest: list[Number]
) -> None:
    """Report a call: its tensors, their places among the arguments, and its numbers, NaN for None."""
    calls = _known.get(number)
    if calls is not None:
        args: list[Any] = [None if isnan(x) else x for x in rest]
        for place, tensor in zip(places, tensors, strict=True):  # ascending
            args.insert(place, tensor)
        calls.tell(*args)


@tell_from_graph.register_fake
def _(
    seen: torch.Tensor, number: int, tensors: list[torch.Tensor], places: list[int], rest: list[Number]
) -> None:
    return None
