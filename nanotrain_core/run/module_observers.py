"""Observers, by which monitors receive what modules return in a logged step, by the modules' global names,
and the arguments of functions that these call, such as attention.

An observer of outputs is a forward hook. ``torch.compile`` is applied to a module's ``forward``, inside its
hooks, so the hook of a compiled layer runs between graphs and leaves them unchanged; modules inside a graph
cannot be observed, since their hooks would be traced. Function calls are observed inside a graph, too: see
:mod:`~nanotrain_core.run.call_observers`. A recomputation, for activation checkpointing, is not observed
again. In steps in which it is not read an observer costs one Python call that returns immediately.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from nanotrain_core.compile.function import CompiledFunction
from nanotrain_core.errors import PluginError, did_you_mean
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.roles import Role, main_layers, natural_sort_key, overridden_by, tagged
from nanotrain_core.models.activation_checkpointing import outside_of_layers
from nanotrain_core.models.ops import Ops
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.run.call_observers import CallObservers
from nanotrain_core.run.monitor_collectives import MonitorCollectives

#: Receives a module's name and its output.
OutputCallback = Callable[[str, Any], None]
#: Returns whether a monitor reads its observers in the current step.
When = Callable[[], bool]


@attrs.define(eq=False)
class ModuleObserver:
    """One registered observer of outputs or calls."""

    owner: int
    """The monitor's index in the run."""
    when: When
    on: bool = False
    """Whether the observer is read in the current step."""


class ModuleObservers:
    """The observers of modules on this rank's model parts."""

    def __init__(
        self,
        parts: Collection[nn.Module],
        passes: Passes,
        collectives: MonitorCollectives | None = None,
        fail: Callable[[int, Exception], None] = lambda monitor, problem: None,
    ) -> None:
        """Register no observers yet.

        Args:
            parts: the model's parts on this rank.
            passes: report whether a pass is a recomputation.
            collectives: records when monitors may call no collective.
            fail: is called with a monitor, by its index in the run, whose ``look`` failed.
        """
        self.passes, self.collectives, self.fail = passes, collectives, fail
        named = {id(module): (name, module) for part in parts for name, module in named_modules(part)}
        self.modules = [*named.values()]
        """(name, module). Two parts of a rank may each have a module of one name, as a tied embedding."""
        self.blocks = [name for part in parts for name in block_names(part)]
        self.inside_graphs = {
            f"{name}.{inner}": name
            for name, module in self.modules
            if isinstance(overridden_by(module), CompiledFunction)
            for inner, _ in module.named_modules()
            if inner
        }
        self.left_out: Collection[int] = ()
        """Monitors, by their index in the run, whose observers are no longer called."""
        self._observers: list[ModuleObserver] = []
        self._handles: list[RemovableHandle] = []
        self._calls: list[CallObservers] = []

    def observe_outputs(
        self,
        owner: int,
        mesh: Mesh,
        look: OutputCallback,
        modules: Sequence[str] = (),
        *,
        compiled: bool = True,
        when: When = lambda: True,
    ) -> list[str]:
        """Call ``look(name, output)`` with what modules return in each forward pass of logged steps.

        Collective: in ``on_start``, on all ranks.

        Args:
            owner: the monitor's index in the run.
            mesh: the mesh that the monitor was given.
            look: must modify nothing and call no collective; what it publishes belongs to the step. Output is
                the first tensor of what the module returned, detached; if there is none, the return value. A
                head's is the sum of its microbatch's losses, which depends on how a batch is divided.
            modules: names or patterns, ``layers.*.attn``; by default the first, middle and last layer.
            compiled: reject modules inside compiled layers; False omits them.
            when: whether to call ``look``, evaluated before the passes of each logged step: for a monitor
                that reads only some steps.

        Returns:
            The names that were found in the whole model, in its order.

        Raises:
            PluginError: nothing has such a name on any rank, or it is inside a compiled layer.
        """
        found = self._found(mesh, modules, compiled=compiled)
        observer = self._new(owner, when)
        for name, module in self._own(found):
            hook = self._hook(observer, name, look)
            self._handles.append(module.register_forward_hook(hook))
        return found

    def observe_calls(
        self,
        owner: int,
        mesh: Mesh,
        function: str,
        look: Callable[..., None],
        modules: Sequence[str] = (),
        *,
        when: When = lambda: True,
    ) -> list[str]:
        """Call ``look(name, *args)`` with the arguments of modules' calls to a function of their table.

        As :meth:`observe_outputs`: in each forward pass of logged steps, also inside of compiled layers.

        Args:
            owner: the monitor's index in the run.
            mesh: the mesh that the monitor was given.
            function: a field of :class:`~nanotrain_core.models.ops.Ops`, such as ``attention``.
            look: receives the name of the observed module that makes the call, and its arguments, tensors
                detached. Those of attention are this rank's heads, for whole sequences.
            modules: names or patterns, by default the first, middle and last layer.
            when: as in :meth:`observe_outputs`.

        Returns:
            The names that were found in the whole model, in its order. In a model whose modules have no table
            ``look`` is never called.

        Raises:
            PluginError: there is no such function; or as in :meth:`observe_outputs`.
        """
        if function not in (known := [field.name for field in fields(Ops)]):
            raise PluginError(f"models call no function '{function}'{did_you_mean(function, known)}")
        found = self._found(mesh, modules)
        inside: list[str] = []
        observer = self._new(owner, when)

        def enter(name: str, *_: Any) -> None:
            inside.append(name)

        def leave(*_: Any) -> None:
            inside.pop()

        def tell(*args: Any) -> None:
            if inside and observer.on and not self.passes.in_backward:
                given = (x.detach() if isinstance(x, torch.Tensor) else x for x in args)
                self._call(owner, look, inside[-1], *given)

        for name, module in self._own(found):
            self._handles.append(module.register_forward_pre_hook(partial(enter, name)))
            self._handles.append(module.register_forward_hook(leave, always_call=True))
        calls = CallObservers(tell, mesh.device)
        calls.observe(function, [module for _, module in self.modules])
        self._calls.append(calls)
        return found

    def _found(self, mesh: Mesh, modules: Sequence[str], *, compiled: bool = True) -> list[str]:
        """Return the names that match the patterns, on all ranks. Collective."""
        own = [name for name, _ in self.modules if _any(name, modules)]
        everyone = mesh.gather((self.blocks, own, [name for name in own if name in self.inside_graphs]))
        blocks, found, inside = (
            sorted({name for rank in everyone for name in rank[which]}, key=natural_sort_key)
            for which in range(3)
        )
        if not modules:
            layers = main_layers(blocks)
            found = (
                sorted({layers[n] for n in (0, len(layers) // 2, -1)}, key=natural_sort_key) if layers else []
            )
        for pattern in modules:
            if not any(fnmatchcase(name, pattern) for name in found):
                near = did_you_mean(pattern, [name for name, _ in self.modules])
                raise PluginError(f"no module is called '{pattern}' on any rank{near}")
        if compiled and inside:
            block = self.inside_graphs.get(inside[0], inside[0].rpartition(".")[0])
            raise PluginError(
                f"{inside[0]} is inside of {block}, which is compiled: look at {block}, or set "
                "run.compile = false"
            )
        return [name for name in found if name not in inside]

    def _own(self, names: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
        """Yield this rank's modules of these names."""
        wanted = {*names}
        yield from (named for named in self.modules if named[0] in wanted)

    def _is_read(self, observer: ModuleObserver) -> bool:
        try:
            return observer.owner not in self.left_out and observer.when()
        except Exception as problem:
            self.fail(observer.owner, problem)
            return False

    def _new(self, owner: int, when: When) -> ModuleObserver:
        self._observers.append(ModuleObserver(owner, when))
        return self._observers[-1]

    @contextmanager
    def observing(self, logged: bool) -> Iterator[None]:
        """In a logged step, observe the modules that run within the block, for monitors that read them."""
        for observer in self._observers:
            observer.on = logged and self._is_read(observer)
        self.passes.observed = any(observer.on for observer in self._observers)
        try:
            yield
        finally:
            self.passes.observed = False
            for observer in self._observers:
                observer.on = False

    def remove(self) -> None:
        """Remove all observers."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._observers.clear()
        while self._calls:
            self._calls.pop().restore()

    def _hook(self, observer: ModuleObserver, name: str, look: OutputCallback) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if observer.on and not self.passes.in_backward:
                self._look(observer.owner, name, look, output)

        return hook

    def _look(self, owner: int, name: str, look: OutputCallback, output: Any) -> None:
        first = output[0] if isinstance(output, tuple | list) and output else output
        self._call(owner, look, name, first.detach() if isinstance(first, torch.Tensor) else first)

    @torch.no_grad()
    def _call(self, owner: int, look: Callable[..., None], *args: Any) -> None:
        assert self.collectives is not None
        if owner in self.left_out:
            return
        self.collectives.forbidden = "while it looks at a module, where ranks are at different places"
        try:
            with outside_of_layers():
                look(*args)
        except Exception as problem:
            self.fail(owner, problem)
        finally:
            self.collectives.forbidden = ""


@runtime_checkable
class NamesFromInside(Protocol):
    """A part around a plain model, by whose names its modules and parameters are known: that of a script."""

    named_root: nn.Module


def named_modules(part: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a part under the prefixes of their parameters' names."""
    root = part.named_root if isinstance(part, NamesFromInside) else part
    yield from ((name, module) for name, module in root.named_modules() if name)


def block_names(part: nn.Module) -> list[str]:
    """Return the layers of a part: modules of role BLOCK; in a plain model, those of its longest list."""
    found = [name for name, _, tag in tagged(part) if tag.role is Role.BLOCK]
    lists = [
        (name, each) for name, each in named_modules(part) if isinstance(each, nn.ModuleList | nn.Sequential)
    ]
    if found or not lists:
        return found
    name, longest = max(lists, key=lambda pair: len(pair[1]))
    return [f"{name}.{number}" for number in range(len(longest))]


def _any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
