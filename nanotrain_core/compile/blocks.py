"""``torch.compile`` of a model's layers: which modules are compiled, and how they share graphs.

Applied in torchtitan's order: after tensor parallelism and activation checkpointing, whose code is part of
the graphs, and before gradient sync. A layer's ``forward`` is compiled, inside the layer's
own hooks, which an optimizer that prefetches weights installs.

Identical layers share one function, and so one graph for each kind of call: see
:mod:`~nanotrain_core.compile.function`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import nn

from nanotrain_core.compile.function import CompiledFunction
from nanotrain_core.layout.roles import Role, overridden_by, override_forward, tag_of, tagged
from nanotrain_core.models.activation_checkpointing import blocks
from nanotrain_core.pipeline.passes import Passes

#: What layers that share a graph may be given as an argument, if it is equal.
PLAIN = (bool, int, float, str, bytes, NoneType, Enum, torch.dtype, torch.device)


def compile_blocks(
    parts: Collection[nn.Module],
    backend: str,
    *,
    eager: Collection[Role] = (),
    options: Mapping[str, Any] | None = None,
    passes: Passes | None = None,
    log: bool = True,
) -> list[str]:
    """Compile the layers of ``parts``; parameters and modules stay as they are.

    Args:
        parts: of the model, wrapped and converted; they may still be on ``meta``.
        backend: a name that torch knows.
        eager: modules of these roles stay eager, and the modules that contain them are compiled in pieces
            around them.
        options: of the backend.
        passes: of the run; they may request eager calls.
        log: whether to log to standard error what is compiled and how long it took.

    Returns:
        The names of the compiled modules.
    """
    shared: dict[Any, CompiledFunction] = {}
    names = []
    for part in parts:
        known = {module: name for name, module in part.named_modules()}
        for block in blocks(part):
            for module in pieces(block, eager):
                kind = _kind(module)
                if kind not in shared:
                    forward = overridden_by(module) or type(module).forward
                    shared[kind] = CompiledFunction(
                        forward,
                        backend,
                        known[module],
                        options=options,
                        log=log,
                        parts=parts,
                        passes=passes,
                    )
                shared[kind].modules += 1
                override_forward(module, shared[kind])
                names.append(known[module])
    return names


def pieces(module: nn.Module, eager: Collection[Role]) -> Iterator[nn.Module]:
    """Yield ``module``, or if it contains modules that stay eager, the largest ones without any.

    A single norm or linear layer is already one kernel, and is not compiled.
    """
    if not any(tag.role in eager for _, _, tag in tagged(module)):
        yield module
        return
    for child in module.children():
        if tag_of(child) is None and any(True for _ in tagged(child)):
            yield from pieces(child, eager)


def _kind(module: nn.Module) -> Any:
    """Return a key that is equal for modules that can share graphs."""
    return (
        _function(overridden_by(module) or type(module).forward),
        tuple((name, type(each), tag_of(each), _hooks(each)) for name, each in module.named_modules()),
        tuple((name, each.shape, each.dtype, each.requires_grad) for name, each in module.named_parameters()),
    )


def _function(function: Callable[..., Any]) -> Any:
    if isinstance(function, partial):
        given = tuple(_given(each) for each in function.args)
        named = tuple((name, _given(each)) for name, each in sorted(function.keywords.items()))
        return _function(function.func), given, named
    return function


def _given(value: Any) -> Any:
    """Return a key of an argument of a partial: plain values are equal, everything else only to itself.

    Two tensors or modules may look the same, and a graph would compute each layer with those of the first.
    """
    if callable(value):
        return _function(value)
    if isinstance(value, (tuple, frozenset)):
        return type(value), tuple(map(_given, value))
    return (type(value), repr(value)) if isinstance(value, PLAIN) else id(value)


def _hooks(module: nn.Module) -> tuple[int, ...]:
    """Return the number of hooks of each sort."""
    backward = len(module._backward_pre_hooks), len(module._backward_hooks)
    return len(module._forward_pre_hooks), len(module._forward_hooks), *backward
