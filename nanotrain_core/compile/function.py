"""A function compiled by ``torch.compile`` into few, bounded graphs, with a log line for each.

The first call of a new kind may trace another graph. For that call, gradients in another dtype than their
parameter's, which torch cannot trace, are set aside, and a checkpointed layer may cache its gathered input, a
side effect. torch makes a size that has changed symbolic, so a third batch size needs no third graph. After
:data:`MOST_GRAPHS` graphs, new kinds of calls run eagerly.

Calls of a known kind only look for a graph (``torch._dynamo.run``). Without one, as when an attribute of a
module has changed, they are first calls too: so every graph is counted, and traced with torch's options
for it, which cost too much to set in every call.

``torch._dynamo``, which takes two seconds to import, is loaded by its first use: where something is compiled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import structlog
import torch
from torch import nn

from nanotrain_core.compile.in_place_writes import RefusesWrites
from nanotrain_core.errors import NanotrainError, in_one_line
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.gemm import gemms_of, prepare_weights

#: Maximum number of graphs of identical layers. Training and evaluation may each need three: for the first
#: size, for a single sequence (which torch never makes symbolic) and for any size. The limit is twice that.
MOST_GRAPHS = 12

_log = structlog.get_logger()


class CompiledFunction:
    """Replaces a function, such as the ``forward`` of identical modules."""

    def __init__(
        self,
        function: Callable[..., Any],
        backend: str,
        name: str,
        *,
        options: Mapping[str, Any] | None = None,
        log: bool,
        modules: int = 0,
        parts: Collection[nn.Module] = (),
        passes: Passes | None = None,
    ) -> None:
        """Prepare; graphs are compiled when the function is called.

        Args:
            function: the current function; a ``forward`` takes its module first.
            backend: of ``torch.compile``.
            name: of the first of the modules.
            options: of the backend.
            log: whether to log new graphs.
            modules: number of modules that share it so far.
            parts: of the run: a wrapper's function may read parameters outside of the layer.
            passes: of the run; they may request eager calls.
        """
        self.function, self.backend, self.name, self.log = function, backend, name, log
        self.parts, self.passes = parts, passes or Passes()
        self.modules = modules
        """Number of modules that share this."""
        self.graphs = 0
        """Number of graphs so far; at least :attr:`most` if torch refuses more."""
        self.known: set[Any] = set()
        """Kinds of calls that have a graph."""
        self._tracing = False
        self._gemms: dict[nn.Module, list[nn.Module]] = {}
        self._compiled: Callable[..., Any] = torch.compile(
            _own_function(function, self._without_graph),
            fullgraph=True,
            backend=RefusesWrites(backend, name, options),
        )
        self._find_graph: Callable[..., Any] = torch._dynamo.run(self._compiled)

    def _linear(self, module: nn.Module) -> list[nn.Module]:
        """Return the modules of ``module`` whose GEMMs are computed by a backend."""
        if module not in self._gemms:
            self._gemms[module] = [each for each in module.modules() if gemms_of(each) is not None]
        return self._gemms[module]

    @property
    def most(self) -> int:
        """Maximum number of graphs: modules with different hooks need some each."""
        return MOST_GRAPHS * self.modules

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the function.

        Raises:
            NanotrainError: something in it cannot be traced.
        """
        if self.passes.eager:
            return self.function(*args, **kwargs)
        for each in args:
            if isinstance(each, nn.Module):
                prepare_weights(self._linear(each))
        call = torch.is_grad_enabled(), _signature(args), _signature(kwargs.values())
        if call in self.known:
            return self._find_graph(*args, **kwargs)
        if self.graphs >= self.most:
            return self.function(*args, **kwargs)
        result = self._first(*args, **kwargs)
        self.known.add(call)
        return result

    def _without_graph(self, *args: Any, **kwargs: Any) -> Any:
        """Make a call for which there is no graph: something other than its arguments has changed."""
        if self._tracing or self.graphs >= self.most:  # traced no graph: torch's compiler is switched off
            return self.function(*args, **kwargs)
        return self._first(*args, **kwargs)

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        """Make the first call of a kind, which may compile a graph."""
        fields = {"layer": self.name, "alike": self.modules, "backend": self.backend}
        if self.log and not self.graphs:
            _log.info("compiling", **fields)
        before, began = _graphs_made(), time.perf_counter()
        # Activation checkpointing inside a graph does not repeat side effects, such as that a
        # tensor-parallel boundary caches the tensor that it has gathered. Monitors and wrappers put hooks on
        # modules after a graph was made, or on one of the modules that share it: torch by default ignores
        # hooks on a module that had none.
        flags = {
            "skip_nnmodule_hook_guards": False,
            "skip_fwd_side_effects_in_bwd_under_checkpoint": True,
            "recompile_limit": self.most,
            "accumulated_recompile_limit": self.most,
        }
        self._tracing = True
        try:
            with torch._dynamo.config.patch(flags), _without_wide_gradients((*self.parts, *args)):
                result = self._compiled(*args, **kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            self.graphs = self.most  # torch counts some graphs that are in no statistics
            return self.function(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as problem:
            raise NanotrainError(
                f"run.compile: {self.name} cannot be compiled by {self.backend}: {in_one_line(problem)}; "
                "set run.compile = false, or have the component whose code this is declare stays_eager"
            ) from problem
        finally:
            self._tracing = False
        made = _graphs_made() - before
        self.graphs += made
        if self.log and made:
            shape = next((tuple(x.shape) for x in args if isinstance(x, torch.Tensor)), ())
            seconds = round(time.perf_counter() - began, 1)
            _log.info("compiled", **fields, shape=shape, train=torch.is_grad_enabled(), seconds=seconds)
        return result


def _graphs_made() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _own_function(function: Callable[..., Any], without_graph: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with its own code object: torch counts and keeps graphs by code object.

    Python runs that code only where torch neither finds nor makes a graph: then it is ``without_graph``.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return function(*args, **kwargs)
        return without_graph(*args, **kwargs)

    return FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)


@contextmanager
def _without_wide_gradients(reached: Iterable[Any]) -> Iterator[None]:
    """Set aside gradients in another dtype than their parameter's: torch refuses to trace such a pair.

    Modules among what is reached have them from a step's second microbatch on, where gradients of bfloat16
    weights are accumulated in float32.
    """
    modules = (each for each in reached if isinstance(each, nn.Module))
    found = [(each, each.grad) for module in modules for each in module.parameters()]
    wide = [(each, gradient) for each, gradient in found if gradient is not None]
    wide = [(each, gradient) for each, gradient in wide if gradient.dtype != each.dtype]
    for each, _ in wide:
        each.grad = None
    try:
        yield
    finally:
        for each, gradient in wide:
            each.grad = gradient


def _signature(arguments: Iterable[Any]) -> tuple[Any, ...]:
    """Return the properties of arguments for which a call may require another graph."""
    return tuple(map(_of_argument, arguments))


def _of_argument(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.shape, x.dtype, x.requires_grad
    if isinstance(x, nn.Module):
        return id(x), x.training
    if isinstance(x, tuple | list):
        return _signature(x)
    return x if isinstance(x, bool) else type(x)
