"""Makes each module wait, just before it is called, for weights that are still in flight.

An optimizer may return from its step while updated weights are in flight (ZeRO all-gathers them during the
next forward). It offers ``wait(parameters)``, which the core calls at these points:

- a tagged module that is in no other tagged one (a layer, a final norm, the head) waits for its own
  parameters when it is called: roles guarantee that nothing else reads them before, and the harness tests it;
- everything else, including the embedding, which a head may share, is waited for when its part is called.

A reader of weights outside a forward pass (a checkpoint, a monitor) waits for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import nn

from nanotrain_core.layout.roles import Role, tag_of

Wait = Callable[[Collection[nn.Parameter]], None]


def install_ready_hooks(parts: Iterable[nn.Module], optimizer: Any) -> Callable[[], None]:
    """Install the waits in ``parts`` if ``optimizer`` offers ``wait``.

    Returns:
        A function that waits for all their parameters.
    """
    if not optimizer.returns_early:
        return lambda: None
    wait: Wait = optimizer.wait
    parameters: list[nn.Parameter] = []
    for part in parts:
        parameters += part.parameters()
        early = set(part.parameters())
        for module in readers(part):
            own = tuple(module.parameters())
            early -= set(own)
            _wait_before(module, wait, own)
        _wait_before(part, wait, tuple(early))
    return lambda: wait(parameters)


def readers(root: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules below ``root`` that are the only readers of their parameters."""
    for child in root.children():
        found = tag_of(child)
        if found is None:
            yield from readers(child)
        elif found.role is not Role.VOCAB:
            yield child


def _wait_before(module: nn.Module, wait: Wait, parameters: Collection[nn.Parameter]) -> None:
    """Make ``module`` wait before anything else that happens at its call."""
    if parameters:
        module.register_forward_pre_hook(lambda *_: wait(parameters), prepend=True)
