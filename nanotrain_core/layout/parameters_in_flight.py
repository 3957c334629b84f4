"""Has a model wait for weights that are still on their way, each module just before it is called.

An optimizer may return from its step while updated weights travel (ZeRO gathers them during the next
forward). It offers ``wait(parameters)``, and here is when the core calls it:

- a tagged module that is in no other tagged one (a layer, a final norm, the head) waits for its own
  parameters when it is called: roles promise that nobody else reads them before, and the harness checks it;
- everything else, the embedding among it, whose table a head may be lent, is waited for when its part is.

What reads weights outside of a forward pass (a checkpoint, a monitor) waits for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import nn

from nanotrain_core.layout.roles import Role, tag_of

Wait = Callable[[Collection[nn.Parameter]], None]


def install_ready_hooks(parts: Iterable[nn.Module], optimizer: Any) -> Callable[[], None]:
    """Install the waits in ``parts`` if ``optimizer`` offers to be waited for.

    Returns:
        A function that waits for every parameter of them.
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
    """Yield the outermost modules below ``root`` that alone read their parameters, at their own call."""
    for child in root.children():
        found = tag_of(child)
        if found is None:
            yield from readers(child)
        elif found.role is not Role.VOCAB:
            yield child


def _wait_before(module: nn.Module, wait: Wait, parameters: Collection[nn.Parameter]) -> None:
    """Have ``module`` wait before anything else that happens at its call."""
    if parameters:
        module.register_forward_pre_hook(lambda *_: wait(parameters), prepend=True)
