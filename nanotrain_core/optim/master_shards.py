"""The pieces that an optimizer updates: all plain masters at once, the others in waves of some at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from nanotrain_core.contracts import ErrorFeedback, MasterWeight
from nanotrain_core.errors import NanotrainError
from nanotrain_core.layout.placement import Piece

#: Elements of weights that are loaded from their masters at once: 64 MB in float32.
WAVE = 2**24


class MasterShard:
    """One piece in the optimizer, with its master weight and the tensor that torch updates.

    That tensor is the master's own storage if it is plain. Otherwise it holds the weight only from
    :meth:`load` to :meth:`store`, since a master may decode it for that.
    """

    group: dict[str, Any]
    """The group of ``inner.param_groups`` that contains :attr:`weight`, with its learning rate."""

    def __init__(self, piece: Piece, master: MasterWeight) -> None:
        self.piece, self.master = piece, master
        self.feedback = master if isinstance(master, ErrorFeedback) else None
        #: Master and model weight of a plain (float32) master; None for others.
        self.plain = master.plain
        self.parameter, self.placement = piece.parameter, piece.placement
        held = self.plain[0] if self.plain else master.load()
        self.weight = torch.nn.Parameter(held.detach(), requires_grad=False)
        self.size = self.weight.numel()

    def load(self) -> None:
        """Load the weight into the tensor that torch updates."""
        self.weight.data = self.master.load().detach()

    def store(self) -> torch.Tensor | None:
        """Store the weight; return the rounding error, if the optimizer carries it."""
        value = self.weight.detach()
        self.master.store(value)
        lost = None if self.feedback is None else self.feedback.error(value)
        self.forget()
        return lost

    def forget(self) -> None:
        """Release the weight and its gradient."""
        self.weight.grad = None
        self.weight.data = self.weight.data.new_empty(0)


class PlainWeights:
    """All shards whose masters torch updates in place, in lists that are reused from step to step."""

    def __init__(self, shards: Sequence[MasterShard]) -> None:
        self.numbers = [number for number, shard in enumerate(shards) if shard.plain]
        """Their indices among all shards."""
        self.shards = [shards[number] for number in self.numbers]
        self.weights = [shard.weight for shard in self.shards]
        pairs = [shard.plain for shard in self.shards if shard.plain]
        copied = [(master.detach(), weight.detach()) for master, weight in pairs if master is not weight]
        self.masters = [master for master, _ in copied]
        self.copies = [weight for _, weight in copied]

    def write_back(self) -> None:
        """Round every master into its model weight."""
        if self.copies:
            torch._foreach_copy_(self.copies, self.masters)


def step_unless(found_inf: torch.Tensor | None, inner: torch.optim.Optimizer) -> None:
    """Step, or make ``inner`` skip the step on the device if ``found_inf`` is 1.

    ``inner`` must support the attribute ``found_inf``, as torch's fused optimizers do for a gradient scaler.
    """
    if found_inf is None:
        inner.step()
        return
    inner.found_inf = found_inf  # type: ignore[attr-defined]
    try:
        inner.step()
    finally:
        del inner.found_inf  # type: ignore[attr-defined]


T = TypeVar("T", MasterShard, torch.Tensor)


def waves(pieces: Iterable[T], limit: int = WAVE) -> Iterator[list[T]]:
    """Yield pieces in order, in waves of at most ``limit`` elements or of one larger piece."""
    wave: list[T] = []
    size = 0
    for piece in pieces:
        own = piece.size if isinstance(piece, MasterShard) else piece.numel()
        if wave and size + own > limit:
            yield wave
            wave, size = [], 0
        wave.append(piece)
        size += own
    if wave:
        yield wave


@contextmanager
def restricted_to(inner: torch.optim.Optimizer, shards: Sequence[MasterShard]) -> Iterator[None]:
    """Restrict ``inner`` to the weights of these shards within the block: all others are not loaded.

    Raises:
        NanotrainError: the block changed a number that is of no single weight, such as a count of steps: one
            training step would change it as often as it has such blocks, which depends on the model's size.
    """
    groups, weights = inner.param_groups, [group["params"] for group in inner.param_groups]
    before = counters_of(inner)
    try:
        for group in groups:
            group["params"] = [shard.weight for shard in shards if shard.group is group]
        inner.param_groups = [group for group in groups if group["params"]]
        yield
    finally:
        inner.param_groups = groups
        for group, each in zip(groups, weights, strict=True):
            group["params"] = each
    if changed := [name for name, value in counters_of(inner).items() if before.get(name, value) != value]:
        raise NanotrainError(
            f"{type(inner).__name__}.step changes {changed[0]}, but a step may call it several times, each "
            "for some weights: expected state of each weight, or the change in precondition() (once a step)"
        )


def counters_of(inner: torch.optim.Optimizer) -> dict[str, float]:
    """Return the numbers that ``inner`` and its groups hold, and how often their tensors were changed."""
    held = {"self": vars(inner), **{f"group {n}": group for n, group in enumerate(inner.param_groups)}}
    pairs = [(f"{of}.{name}", value) for of, each in held.items() for name, value in each.items()]
    return {name: getattr(v, "_version", v) for name, v in pairs if type(v) in (int, float, torch.Tensor)}
