"""Splits the layers of a model into pipeline stages of equal time, or as given by the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, product
from math import inf
from typing import NamedTuple

import attrs

from nanotrain_core.api import Costs, Part, parts_between
from nanotrain_pp_1f1b import InterleavedConfig, PipelineConfig

#: Number of partial splits kept for every number of layers.
KEPT = 8


def split(config: PipelineConfig, costs: Costs, ranks: Sequence[int]) -> tuple[Part, ...]:
    """Return the stages of a model whose pieces cost ``costs``; ``ranks``: the pipeline rank of each.

    Raises:
        ValueError: the config's list does not fit, or there are fewer layers than stages.
    """
    layers = len(costs.layers)
    if config.layers is not None:
        check_list(config.layers, layers, ranks)
        return parts_between([0, *accumulate(config.layers)], ranks)
    if layers < len(ranks):
        raise ValueError(too_few(layers, ranks, v_can_change=isinstance(config, InterleavedConfig)))
    return parts_between([0, *accumulate(balance(in_effect(config, costs), ranks))], ranks)


def in_effect(config: PipelineConfig, costs: Costs) -> Costs:
    """Return the model's costs, with embedding and head costs from the config if set."""
    mean = sum(costs.layers) / len(costs.layers)
    if config.embedding_cost is not None:
        costs = attrs.evolve(costs, embedding=config.embedding_cost * mean)
    if config.head_cost is not None:
        costs = attrs.evolve(costs, head=config.head_cost * mean)
    return costs


def check_list(sizes: Sequence[int], layers: int, ranks: Sequence[int]) -> None:
    """Check a list of layers per stage.

    Raises:
        ValueError: it has another number of stages, or of layers, or leaves a rank empty.
    """
    stages = f"{len(ranks)} stages ({per_rank(ranks)})"
    if len(sizes) != len(ranks):
        raise ValueError(f"layers = {list(sizes)} names {len(sizes)} stages; expected {stages}")
    if sum(sizes) != layers:
        near = "" if (last := sizes[-1] + layers - sum(sizes)) < 0 else f"; {[*sizes[:-1], last]} would do"
        text = f"layers = {list(sizes)} adds up to {sum(sizes)}; expected {layers}, the model's layers{near}"
        raise ValueError(text)
    held = {ranks[0], ranks[-1], *(rank for rank, size in zip(ranks, sizes, strict=True) if size)}
    for rank in sorted(set(ranks) - held):
        raise ValueError(
            f"layers = {list(sizes)} leaves nothing to rank {rank}: give it a layer, or lower pp"
        )


class Beginning(NamedTuple):
    """A split over the first stages. Among splits with equally many layers, the smaller is better."""

    busiest: float
    """Load of the busiest rank: the ends of the model, and the layers assigned so far."""
    squares: float
    """Sum over stages of their squared cost: small if they are balanced."""
    in_last: int
    """Layers of the last stage, once assigned."""
    sizes: tuple[int, ...]
    loads: tuple[float, ...]
    """Load of each rank."""

    def then(self, size: int, cost: float, end: float, rank: int, *, final: bool) -> Beginning:
        """Return it with one more stage: ``size`` layers with cost ``cost``, and an end of the model."""
        load = round(self.loads[rank] + cost, 9)  # rounded so that rounding errors decide nothing
        return Beginning(
            max(self.busiest, load),
            round(self.squares + (cost + end) ** 2, 9),
            size * final,
            (*self.sizes, size),
            (*self.loads[:rank], load, *self.loads[rank + 1 :]),
        )


def balance(costs: Costs, ranks: Sequence[int]) -> list[int]:
    """Return layers per stage such that the slowest stage is as fast as possible.

    Every stage has a layer, except that the first and the last may contain only an embedding or a head with
    nonzero cost. Among splits with an equal slowest stage it is one whose busiest rank has the least load (if
    ranks have several stages, among the :data:`KEPT` best partial splits); then one with balanced stages;
    then the last stage gets the fewest, and later ones more, since the first hold most activations.

    Args:
        costs: of a model with at least as many layers as stages.
        ranks: the pipeline rank of each stage.

    >>> balance(Costs(layers=(1.0,) * 10, head=1.5), [0, 1, 2, 3])
    [3, 3, 3, 1]
    >>> balance(Costs(layers=(1.0, 1.0, 1.0, 2.0, 2.0), head=4.0), [0, 1, 2])
    [3, 2, 0]
    """
    return list(_balanced(costs, tuple(ranks)))


@lru_cache(64)  # a plan composes a rank of every stage, and each calls this
def _balanced(costs: Costs, ranks: tuple[int, ...]) -> tuple[int, ...]:
    total, count, final = costs.total or 1.0, len(costs.layers), len(ranks) - 1
    ends = [0.0] * len(ranks)
    ends[0] += costs.embedding / total
    ends[final] += costs.head / total
    edges = [edge / total for edge in accumulate(costs.layers, initial=0.0)]
    limit = slowest(edges, ends) + 1e-9
    loads = [0.0] * (max(ranks) + 1)
    for end, rank in zip(ends, ranks, strict=True):
        loads[rank] += end
    found = {0: [Beginning(max(loads), 0.0, 0, (), tuple(loads))]}  # by the number of assigned layers
    for stage, (end, rank) in enumerate(zip(ends, ranks, strict=True)):
        longer: dict[int, list[Beginning]] = {}
        for first, last in product(found, range(count + 1)):
            size, cost = last - first, edges[last] - edges[first]
            if size >= (not end) and cost + end <= limit:
                new = [each.then(size, cost, end, rank, final=stage == final) for each in found[first]]
                longer.setdefault(last, []).extend(new)
        found = {last: sorted(each)[:KEPT] for last, each in longer.items()}
    return found[count][0].sizes


def slowest(edges: Sequence[float], ends: Sequence[float]) -> float:
    """Return the cost of the slowest stage in the best split.

    Args:
        edges: cost of the first 0, 1, 2 ... layers.
        ends: what each stage costs besides its layers; one without such costs has at least one layer.
    """
    best = [0.0, *[inf] * (len(edges) - 1)]  # of splitting the first 0, 1, 2 ... layers over no stage
    for end in ends:
        best = [
            min((max(best[f], edge - edges[f] + end) for f in range(last + 1 - (not end))), default=inf)
            for last, edge in enumerate(edges)
        ]
    return best[-1]


def too_few(layers: int, ranks: Sequence[int], *, v_can_change: bool) -> str:
    """Return an error: not enough layers, and what would be enough."""
    pp = len(set(ranks))
    each = len(ranks) // pp
    largest = {"pp": layers // each, "v": layers // pp if v_can_change else 0}
    remedies = [f"at most {name} = {value}" for name, value in largest.items() if value]
    remedies.append("list [schedule] layers, where a stage may have 0")
    return f"{layers} layers cannot fill {len(ranks)} stages ({per_rank(ranks)}): {', or '.join(remedies)}"


def per_rank(ranks: Sequence[int]) -> str:
    """Return how the number of stages is computed, as text."""
    pp = len(set(ranks))
    return f"pp {pp}" if pp == len(ranks) else f"pp {pp} x {len(ranks) // pp} on each rank"
