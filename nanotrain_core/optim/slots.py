"""What an optimizer updates: pieces with their masters, those kept plain at once and others wave by wave."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from nanotrain_core.contracts import ErrorFeedback, MasterWeight
from nanotrain_core.layout.placement import Piece

#: Elements of weights that are loaded from their masters at a time: 64 MB in float32.
WAVE = 2**24


class Slot:
    """One piece as an optimizer sees it: its master, and the tensor that torch updates.

    That tensor is the master's own storage if it is plain. Otherwise it has the weight from :meth:`load` to
    :meth:`store` only, since a master may decode it for that.
    """

    group: dict[str, Any]
    """Of ``inner.param_groups``, where :attr:`weight` is: its learning rate stands there."""

    def __init__(self, piece: Piece, master: MasterWeight) -> None:
        self.piece, self.master = piece, master
        self.feedback = master if isinstance(master, ErrorFeedback) else None
        self.plain = master.plain
        self.parameter, self.placement = piece.parameter, piece.placement
        held = self.plain[0] if self.plain else master.load()
        self.weight = torch.nn.Parameter(held.detach(), requires_grad=False)
        self.size = self.weight.numel()

    def load(self) -> None:
        """Show torch the weight."""
        self.weight.data = self.master.load().detach()

    def store(self) -> torch.Tensor | None:
        """Keep the weight; return what was lost of it, if the optimizer is to carry that."""
        value = self.weight.detach()
        self.master.store(value)
        lost = None if self.feedback is None else self.feedback.error(value)
        self.forget()
        return lost

    def forget(self) -> None:
        """Let go of the weight and its gradient."""
        self.weight.grad = None
        self.weight.data = self.weight.data.new_empty(0)


class PlainWeights:
    """All slots whose masters torch updates in place, in lists that stay the same from step to step."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.numbers = [number for number, slot in enumerate(slots) if slot.plain]
        """Of each among all slots."""
        self.slots = [slots[number] for number in self.numbers]
        self.weights = [slot.weight for slot in self.slots]
        pairs = [slot.plain for slot in self.slots if slot.plain]
        copied = [(master.detach(), weight.detach()) for master, weight in pairs if master is not weight]
        self.masters = [master for master, _ in copied]
        self.copies = [weight for _, weight in copied]

    def write_back(self) -> None:
        """Round every master into its weight of the model."""
        if self.copies:
            torch._foreach_copy_(self.copies, self.masters)


def step_unless(found_inf: torch.Tensor | None, inner: torch.optim.Optimizer) -> None:
    """Step, or have ``inner`` skip the step on the device if ``found_inf`` is 1 there.

    ``inner`` must heed its attribute ``found_inf``, as torch's fused optimizers do for a gradient scaler.
    """
    if found_inf is None:
        inner.step()
        return
    inner.found_inf = found_inf  # type: ignore[attr-defined]
    try:
        inner.step()
    finally:
        del inner.found_inf  # type: ignore[attr-defined]


def waves(slots: Iterable[Slot], limit: int = WAVE) -> Iterator[list[Slot]]:
    """Yield slots in their order, together as many as have at most ``limit`` elements, or one larger one."""
    wave: list[Slot] = []
    size = 0
    for slot in slots:
        if wave and size + slot.size > limit:
            yield wave
            wave, size = [], 0
        wave.append(slot)
        size += slot.size
    if wave:
        yield wave


@contextmanager
def only(inner: torch.optim.Optimizer, slots: Sequence[Slot]) -> Iterator[None]:
    """Have ``inner`` see the weights of these slots alone: all others are not loaded."""
    groups, weights = inner.param_groups, [group["params"] for group in inner.param_groups]
    try:
        for group in groups:
            group["params"] = [slot.weight for slot in slots if slot.group is group]
        inner.param_groups = [group for group in groups if group["params"]]
        yield
    finally:
        inner.param_groups = groups
        for group, each in zip(groups, weights, strict=True):
            group["params"] = each
