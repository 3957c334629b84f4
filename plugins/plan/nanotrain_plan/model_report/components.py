"""A model taken apart: embedding, one layer of each kind, head, built on ``meta`` and run there.

Layers that cost the same FLOPs are taken to be alike: of 61 layers two are built and run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property

import attrs
import torch
from torch import nn

from nanotrain_core.api import Part, Recipe, Registry, Selection, tagged
from nanotrain_core.api.torch import Batch, Model
from nanotrain_plan import DryKernelsConfig
from nanotrain_plan.dry.kernels import DryKernels
from nanotrain_plan.dry.phase import Phase
from nanotrain_plan.dry.recorder import Recorder
from nanotrain_plan.dry.values import Values


@attrs.define(frozen=True, kw_only=True)
class Matrix:
    """A parameter of a piece."""

    name: str
    role: str
    """In lower case; empty without one."""
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Numbers in it."""
        return torch.Size(self.shape).numel()


@attrs.define(frozen=True, kw_only=True, eq=False, slots=False)
class Piece:
    """A part of the model, and how many of its kind there are."""

    name: str
    """``embedding``, ``layers 3 to 60``, ``head``."""
    number: int
    part: Part
    module: nn.Module
    flops: float
    """Of one, forward and backward, for a token, as the model says it."""

    @cached_property
    def matrices(self) -> Sequence[Matrix]:
        """Parameters, with the role of the innermost tagged module that has them."""
        roles: dict[str, str] = {}
        for name, module, tag in tagged(self.module):
            for parameter, _ in module.named_parameters(prefix=name):
                roles[parameter] = tag.role.name.lower()
        return [
            Matrix(name=name, role=roles.get(name, ""), shape=tuple(parameter.shape))
            for name, parameter in self.module.named_parameters()
        ]


@attrs.define(frozen=True, kw_only=True, eq=False)
class Pieces:
    """Of a whole model."""

    model: Model
    pieces: Sequence[Piece]
    dtype: torch.dtype

    @classmethod
    def of(cls, selection: Selection, registry: Registry, recipe: Recipe, dtype: torch.dtype) -> Pieces:
        """Build one of each kind."""
        model: Model = registry.build(selection)
        ops = DryKernels(DryKernelsConfig()).ops(torch.device("meta"))
        found = [
            Piece(name=name, number=number, part=part, module=model.build(part, ops), flops=flops)
            for name, number, part, flops in _parts(model, recipe.batch.length)
        ]
        return cls(model=model, pieces=found, dtype=dtype)

    def parameters(self) -> int:
        """Return the elements of the model; of a table that embedding and head share, once."""
        total, seen = 0, set[str]()
        for piece in self.pieces:
            for each in piece.matrices:
                if each.name not in seen:
                    total += each.elements * piece.number
                seen.add(each.name)
        return total

    def run(
        self,
        sequences: int,
        length: int,
        *,
        training: bool = False,
        keeps: bool | None = None,
        last: bool = False,
    ) -> Iterator[tuple[Piece, Phase]]:
        """Yield what one of each kind does in a forward pass, embedding first.

        Args:
            sequences: B.
            length: S.
            training: compute the losses, those of further tokens (MTP) too.
            keeps: activations for backward; None: if ``training``. A loss then makes its gradients at once.
            last: the head sees the last token of each sequence alone, as after a prompt.
        """
        recorder = Recorder("meta", Values())
        with (
            recorder,
            recorder.watching_modules(),
            torch.set_grad_enabled(training if keeps is None else keeps),
        ):
            recorder.enter("begin")
            tokens = torch.empty(sequences, length, dtype=torch.int64, device="meta")
            hidden = tokens
            for weight in (w for piece in self.pieces for w in piece.module.to(self.dtype).parameters()):
                recorder.take(weight)
            for piece in self.pieces:
                module = piece.module.train(training)
                recorder.named({each: name for name, each in module.named_modules()})
                if piece.part.has_head and last:
                    tokens, hidden = tokens[:, -1:], hidden[:, -1:]
                if training and hidden.is_floating_point():
                    hidden = hidden.detach().requires_grad_()
                recorder.enter("F")
                out = module(hidden, Batch(tokens, tokens if training else None))
                phase = recorder.phase
                recorder.enter("between")
                yield piece, phase
                hidden = out.value if out.value is not None else hidden


def _parts(model: Model, length: int) -> Iterator[tuple[str, int, Part, float]]:
    """Yield name, number, part and FLOPs of one of each kind."""
    costs = model.flops(length)
    ends = {"has_embedding": True, "has_head": False}
    yield "embedding", 1, Part(first=0, last=0, **ends), costs.embedding
    numbers = Counter(costs.layers)
    for cost, number in numbers.items():
        first = costs.layers.index(cost)
        last = len(costs.layers) - 1 - costs.layers[::-1].index(cost)
        name = f"layers {first} to {last}" if number > 1 else f"layer {first}"
        if number <= last - first:  # others are between them
            name = f"{number} of {name}"
        yield name, number, Part(first=first, last=first + 1, has_embedding=False, has_head=False), cost
    end = len(costs.layers)
    yield "head", 1, Part(first=end, last=end, has_embedding=False, has_head=True), costs.head
