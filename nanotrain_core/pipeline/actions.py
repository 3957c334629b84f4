"""A pipeline schedule as data: model parts, and actions on them. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import attrs


@attrs.define(frozen=True, kw_only=True)
class Part:
    """A run of consecutive layers, ``first`` to ``last`` exclusive; none if they are equal."""

    first: int
    """Its first layer, from 0."""
    last: int
    """One past its last layer."""
    has_embedding: bool
    """Whether it turns tokens into hidden states."""
    has_head: bool
    """Whether it turns hidden states into the loss (or logits), including modules after the head, such as
    MTP."""
    rank: int = 0
    """The pipeline rank that holds it: one rank may hold several."""

    @classmethod
    def whole(cls, layers: int) -> Part:
        """Return the one part of a run without a pipeline."""
        return cls(first=0, last=layers, has_embedding=True, has_head=True)


@attrs.define(frozen=True, kw_only=True)
class Costs:
    """The cost of the embedding, of each layer and of the head, in any one unit: a model gives FLOPs."""

    embedding: float = 0.0
    layers: tuple[float, ...]
    """The cost of each layer, in order."""
    head: float = 0.0
    """The cost of the head, including modules after it."""

    @classmethod
    def alike(cls, layers: int) -> Costs:
        """Return costs for a model known only by its number of layers: each costs 1, all else nothing."""
        return cls(layers=(1.0,) * layers)

    @property
    def total(self) -> float:
        """Return the cost of the whole model."""
        return self.embedding + sum(self.layers) + self.head

    def of(self, part: Part) -> float:
        """Return the cost of a part."""
        ends = self.embedding * part.has_embedding + self.head * part.has_head
        return ends + sum(self.layers[part.first : part.last])


def describe_stages(parts: Sequence[Part], costs: Costs) -> str:
    """Describe how many layers each stage has, and how balanced the pipeline's ranks are.

    >>> costs = Costs(layers=(2.0, 2.0, 2.0, 2.0), head=3.0)
    >>> describe_stages(parts_between([0, 3, 4], [0, 1]), costs)
    'stages 3 | 1 + head: the busiest rank has 1.09 times the mean FLOPs'
    """
    loads = [0.0] * (1 + max(part.rank for part in parts))
    for part in parts:
        loads[part.rank] += costs.of(part)
    sizes = " | ".join(f"{part.last - part.first}{' + head' if part.has_head else ''}" for part in parts)
    busiest = len(loads) * max(loads) / costs.total
    return f"stages {sizes}: the busiest rank has {busiest:.2f} times the mean FLOPs"


def parts_between(edges: Sequence[int], ranks: Sequence[int]) -> tuple[Part, ...]:
    """Return consecutive parts, the first with the embedding, the last with the head.

    Args:
        edges: layer indices, from 0 to the number of layers: one more than there are parts.
        ranks: the pipeline rank of each part.

    >>> [(p.first, p.last, p.has_head) for p in parts_between([0, 2, 5], [0, 1])]
    [(0, 2, False), (2, 5, True)]
    """
    final = len(ranks) - 1
    return tuple(
        Part(first=first, last=last, has_embedding=stage == 0, has_head=stage == final, rank=rank)
        for stage, ((first, last), rank) in enumerate(zip(pairwise(edges), ranks, strict=True))
    )


@attrs.define(frozen=True)
class Action:
    """One entry of a pipeline schedule."""

    kind: Literal["F", "B", "W"]
    """Forward; backward; weight gradients that a backward deferred.

    In a list with a W for a stage and microbatch, that stage's B computes the gradient that the previous
    stage waits for, and leaves the weight-gradient GEMMs to the W. Without one, B computes everything.
    """
    stage: int
    """Number of the part in ``Schedule.parts``."""
    microbatch: int
    """Number of the microbatch in the step, from 0."""

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"
