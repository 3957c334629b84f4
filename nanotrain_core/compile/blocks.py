"""``torch.compile`` of a model's layers: which modules become graphs, and how their graphs are shared.

Applied as torchtitan orders it: after tensor parallelism and activation checkpointing, whose code is part of
the graphs, and before gradient sync. It is the ``forward`` of a layer that is compiled, inside the layer's
own hooks, which an optimizer that prefetches weights puts there.

Layers that are alike share one function, and so one graph for each kind of call. A kind of call that was not
seen before may need another graph, and is prepared for: gradients in another dtype than their parameter's,
which torch cannot trace, are put aside, and a checkpointed layer is allowed to remember its input's gathered
form. torch makes sizes that have changed symbols, so that a third batch size needs no third graph; after
:data:`MOST_GRAPHS` of them new kinds of calls run eager.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import structlog
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters

from nanotrain_core.errors import NanotrainError
from nanotrain_core.layout.roles import Role, tag_of, tagged, take_over, taken_over_by
from nanotrain_core.models.activation_checkpointing import blocks

#: Graphs of layers that are alike: training and evaluation, each for a first size, for one sequence (which
#: torch never makes a symbol) and for any, and as many again.
MOST_GRAPHS = 12

_log = structlog.get_logger()


def compile_blocks(
    parts: Iterable[nn.Module], backend: str, *, eager: Collection[Role] = (), log: bool = True
) -> list[str]:
    """Have the layers of ``parts`` run compiled; parameters and modules stay as they are.

    Args:
        parts: of the model, wrapped and converted; they may be on ``meta`` still.
        backend: a name that torch knows.
        eager: modules of these roles stay eager, and what they are in is compiled in pieces around them.
        log: say on standard error what is compiled and how long it took.

    Returns:
        The names of the compiled modules.
    """
    shared: dict[Any, CompiledForward] = {}
    names = []
    for part in parts:
        known = {module: name for name, module in part.named_modules()}
        for block in blocks(part):
            for module in pieces(block, eager):
                kind = _kind(module)
                if kind not in shared:
                    forward = taken_over_by(module) or type(module).forward
                    shared[kind] = CompiledForward(forward, backend, known[module], log=log)
                shared[kind].modules += 1
                take_over(module, shared[kind])
                names.append(known[module])
    return names


def pieces(module: nn.Module, eager: Collection[Role]) -> Iterator[nn.Module]:
    """Yield ``module``, or where it holds some that stay eager, the largest ones without any.

    A norm or a linear layer by itself is one kernel already, and stays out.
    """
    if not any(tag.role in eager for _, _, tag in tagged(module)):
        yield module
        return
    for child in module.children():
        if tag_of(child) is None and any(True for _ in tagged(child)):
            yield from pieces(child, eager)


class CompiledForward:
    """Runs in the place of the ``forward`` of modules that are alike."""

    def __init__(self, forward: Callable[..., Any], backend: str, name: str, *, log: bool) -> None:
        """Compile nothing yet: that is done by calls.

        Args:
            forward: what is called now, with a module first.
            backend: of ``torch.compile``.
            name: of the first of the modules.
            log: whether to tell of graphs.
        """
        self.forward, self.backend, self.name, self.log = forward, backend, name, log
        self.modules = 0
        """How many share this."""
        self.graphs = 0
        """How many were made."""
        self.known: set[Any] = set()
        """Modules and kinds of calls that have a graph."""
        self._compiled: Callable[..., Any] = torch.compile(
            _own_function(forward), fullgraph=True, backend=backend
        )

    @property
    def most(self) -> int:
        """How many graphs there may be: modules whose hooks torch tells apart need some each."""
        return MOST_GRAPHS * self.modules

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return what ``forward`` does.

        Raises:
            NanotrainError: something in it cannot be traced.
        """
        grad, train = torch.is_grad_enabled(), module.training
        call = (id(module), grad, train, _signature(args), _signature(kwargs.values()))
        if call in self.known:
            try:
                return self._compiled(module, *args, **kwargs)
            except TorchDynamoException:  # something else than arguments asks for a graph, not prepared for
                if self.graphs >= self.most:
                    return self.forward(module, *args, **kwargs)
                return self._first(module, *args, **kwargs)
        if self.graphs >= self.most:
            return self.forward(module, *args, **kwargs)
        result = self._first(module, *args, **kwargs)
        self.known.add(call)
        return result

    def _first(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Make a call of a kind that has not been before."""
        told = {"layer": self.name, "alike": self.modules, "backend": self.backend}
        if self.log and not self.graphs:
            _log.info("compiling", **told)
        before, began = counters["stats"]["unique_graphs"], time.perf_counter()
        # Activation checkpointing inside of a graph runs no side effects again: that a tensor-parallel
        # boundary remembers what it gathered is one.
        flags = {
            "skip_fwd_side_effects_in_bwd_under_checkpoint": True,
            "recompile_limit": self.most,
            "accumulated_recompile_limit": self.most,
        }
        try:
            with torch._dynamo.config.patch(flags), _without_wide_gradients(module):
                result = self._compiled(module, *args, **kwargs)
        except TorchDynamoException as problem:
            said = " ".join(str(problem).split())[:600]
            raise NanotrainError(
                f"run.compile: {self.name} cannot be compiled by {self.backend}: {said}; set run.compile = "
                "false, or have the component whose code this is declare stays_eager"
            ) from problem
        made = counters["stats"]["unique_graphs"] - before
        self.graphs += made
        if self.log and made:
            shape = next((tuple(x.shape) for x in args if isinstance(x, torch.Tensor)), ())
            seconds = round(time.perf_counter() - began, 1)
            _log.info("compiled", **told, shape=shape, train=torch.is_grad_enabled(), seconds=seconds)
        return result


def _own_function(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward`` behind a code object of its own: torch counts and keeps graphs by code objects."""

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(module, *args, **kwargs)

    return FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)


@contextmanager
def _without_wide_gradients(module: nn.Module) -> Iterator[None]:
    """Put aside gradients in another dtype than their parameter's: torch refuses to trace such a pair.

    They are there from a step's second microbatch on, where gradients of bfloat16 weights are added up in
    float32.
    """
    found = [(each, each.grad) for each in module.parameters() if each.grad is not None]
    wide = [(each, gradient) for each, gradient in found if gradient.dtype != each.dtype]
    for each, _ in wide:
        each.grad = None
    try:
        yield
    finally:
        for each, gradient in wide:
            each.grad = gradient


def _signature(arguments: Iterable[Any]) -> tuple[Any, ...]:
    """Return what of a call's arguments may ask for another graph."""
    return tuple(
        (x.shape, x.dtype, x.requires_grad)
        if isinstance(x, torch.Tensor)
        else _signature(x)
        if isinstance(x, tuple | list)
        else type(x)
        for x in arguments
    )


def _kind(module: nn.Module) -> Any:
    """Return what modules have in common that can share graphs."""
    return (
        _function(taken_over_by(module) or type(module).forward),
        tuple((name, type(each), tag_of(each), _hooks(each)) for name, each in module.named_modules()),
        tuple((name, each.shape, each.dtype, each.requires_grad) for name, each in module.named_parameters()),
    )


def _function(function: Callable[..., Any]) -> Any:
    if isinstance(function, partial):
        given = tuple(_function(each) if callable(each) else repr(each) for each in function.args)
        return _function(function.func), given, repr(sorted(function.keywords.items()))
    return function


def _hooks(module: nn.Module) -> tuple[int, int]:
    """Return how many hooks there are."""
    return len(module._forward_pre_hooks), len(module._forward_hooks)
