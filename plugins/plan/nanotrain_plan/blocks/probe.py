"""Dry runs of a few stages with one or two layers each, from which the work of single blocks is derived.

One rank holds a stage with only the embedding, a stage with a single layer for each kind of layer, and a
stage with two neighboring layers; another rank holds only the head. What a stage of two layers does beyond a
stage of one is the work of a layer; the rest is what every stage does at its ends: messages, and tensors that
wait for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import attrs

from nanotrain_core.api import Action, Costs, Layout, NanotrainError, Part, Recipe, Registry
from nanotrain_plan.comms import axis_of
from nanotrain_plan.dry.rank import RankStep, dry_rank, survey
from nanotrain_plan.dry.values import Values
from nanotrain_plan.stages import ReplacedSchedule, pipeline_of_most_tokens


class NotComposable(Exception):
    """The recipe cannot be put together from blocks: it has too few layers, or they are not independent."""


@attrs.define(frozen=True)
class Halves:
    """Which microbatches of a probe have W passes."""

    any: bool
    """Whether one has: then layers compute weight gradients apart in all of them."""
    ends: bool
    """Whether the first and the last have."""


#: Without W passes; with them for all microbatches but one; for one in the middle alone.
PLAIN, MOST_SPLIT, FEW_SPLIT = Halves(False, False), Halves(True, True), Halves(True, False)


#: Pipeline ranks of a probe. One more than hold stages, so that a group of two is not the whole pipeline.
PIPELINE = 3


@attrs.define(frozen=True)
class Pieces:
    """Layers that a probe takes."""

    singles: tuple[int, ...]
    """One of each kind, that of the pair's last."""
    pair: int
    """The first of two neighbors, none of them in :attr:`singles`."""


def choose(costs: Costs) -> Pieces:
    """Return layers that stand for all: layers that cost the same FLOPs are of a kind.

    Raises:
        NotComposable: there are too few.
    """
    layers = costs.layers
    kinds = {cost: [n for n, each in enumerate(layers) if each == cost] for cost in dict.fromkeys(layers)}
    often = sorted(kinds, key=lambda cost: -len(kinds[cost]))
    neighbors = sorted(
        range(len(layers) - 1), key=lambda n: sum(often.index(layers[each]) for each in (n, n + 1))
    )
    for first in neighbors:
        left = {cost: [n for n in found if n not in (first, first + 1)] for cost, found in kinds.items()}
        if all(left.values()):
            common = min((layers[first], layers[first + 1]), key=often.index)
            singles = [left[cost][0] for cost in sorted(left, key=lambda cost: cost == common)]
            return Pieces(tuple(singles), first)
    raise NotComposable(f"{len(layers)} layers are too few to tell one layer from a stage")


class ProbeSchedule:
    """Stages as they are wanted, on one rank or in turn on two; each takes all forward passes first."""

    def __init__(self, parts: Sequence[Part], halves: Halves) -> None:
        self.stages, self.halves = tuple(parts), halves

    def parts(self, costs: Costs, pp: int) -> tuple[Part, ...]:
        """Return the stages: they need not be the whole model."""
        return self.stages

    def actions(self, pp: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
        """Return the passes of each rank through its own stages."""
        return tuple(tuple(self._actions(rank, microbatches)) for rank in range(pp))

    def _actions(self, rank: int, microbatches: int) -> Iterator[Action]:
        """Yield actions stage by stage, so that what a pass leaves to the next one belongs to its own stage.

        The embedding's forward passes come first: the other stages get a shape from its messages. The stage
        of the most common kind of layer comes before the embedding's backward passes: what is allocated once
        is then attributed to that stage, and not to the pair, whose layers stand for others.
        """
        own = [n for n, part in enumerate(self.stages) if part.rank == rank]
        if not own:
            return
        first, *others = own
        numbers = range(microbatches)
        yield from (Action("F", first, m) for m in numbers)
        if others and not rank:
            common = others.pop(-2)
            yield from self._both(common, numbers)
        yield from self._backward(first, numbers)
        for stage in others:
            yield from self._both(stage, numbers)

    def _both(self, stage: int, numbers: range) -> Iterator[Action]:
        yield from (Action("F", stage, m) for m in numbers)
        yield from self._backward(stage, numbers)

    def _backward(self, stage: int, numbers: range) -> Iterator[Action]:
        for m in numbers:
            yield Action("B", stage, m)
            if self._split(m, len(numbers)):
                yield Action("W", stage, m)

    def _split(self, m: int, microbatches: int) -> bool:
        if m in (0, microbatches - 1):
            return self.halves.ends
        return self.halves.any and m == 1


@attrs.define(frozen=True)
class Probe:
    """Steps of the ranks that hold the blocks, and which stage is which block."""

    layout: Layout
    steps: Sequence[RankStep]
    """Of the rank with embedding and layers, and of the one with the head; of a pipeline of one, one step."""
    parts: Sequence[Part]
    axis: Callable[[tuple[int, ...], str], str]
    """The mesh dimensions along which ranks of an operation differ, remembered."""


def pipeline_parts(costs: Costs, pieces: Pieces) -> tuple[Part, ...]:
    """Return the stages of a probe, each with a stage on the other rank behind it, so that all send."""
    end = len(costs.layers)
    wanted = [(0, 0), *((n, n + 1) for n in pieces.singles), (pieces.pair, pieces.pair + 2)]
    found = []
    for number, (first, last) in enumerate(wanted):
        found.append(_part(first, last, embedding=number == 0))
        found.append(_part(last, last, rank=1))
    return (*found[:-1], _part(end, end, head=True, rank=1))


def single_part(costs: Costs) -> tuple[Part, ...]:
    """Return the one stage of a probe without a pipeline: embedding, one layer and head."""
    first = len(costs.layers) // 2
    return (_part(first, first + 1, embedding=True, head=True),)


def _part(first: int, last: int, *, embedding: bool = False, head: bool = False, rank: int = 0) -> Part:
    return Part(first=first, last=last, has_embedding=embedding, has_head=head, rank=rank)


def take_probe(
    recipe: Recipe, registry: Registry, parts: Sequence[Part], halves: Halves, *, host: bool
) -> Probe:
    """Take a step of each rank that holds blocks.

    Args:
        recipe: of a dry run, of the probe's world size and batch.
        registry: the plugins.
        parts: of :func:`pipeline_parts` or :func:`single_part`.
        halves: which microbatches have W passes.
        host: whether ranks are CPUs.

    Raises:
        NotComposable: weights are sharded over data-parallel ranks, of which a layout has as many as it has,
            the topology does not have so few ranks, or a component refuses stages without layers.
    """
    try:
        layout = registry.build(recipe.topology).layout(recipe.run.ranks)
    except ValueError as error:
        raise NotComposable(f"the ranks that tell the same do not fit [topology]: {error}") from None
    probing: Any = ReplacedSchedule(registry, ProbeSchedule(parts, halves))
    pp = 1 + max(part.rank for part in parts)
    ranks = pipeline_of_most_tokens(layout, pp, recipe.batch.length)
    idle: list[Any] = [set()] * (PIPELINE - pp)
    try:
        told = [*survey(recipe, probing, ranks, host=host), *idle] if pp > 1 else []
        values = Values()
        taken = partial(dry_rank, recipe, probing, layout, told=told, values=values, host=host, lasting=False)
        steps = [taken(rank, updates=rank == 0) for rank in ranks]  # the first one's update stands for all
    except NanotrainError as error:  # a wrapper may look for layers in a stage that has the embedding alone
        raise NotComposable(f"its stages cannot be composed: {error}") from None
    if any(step.sharded for step in steps):
        raise NotComposable(
            "weights are sharded over data-parallel ranks: a layer is not alike on all layouts"
        )
    return Probe(layout, steps, tuple(parts), cache(partial(axis_of, layout=layout)))
