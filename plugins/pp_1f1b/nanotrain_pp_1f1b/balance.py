"""Balances the layers of a model over pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain, product
from math import inf
from typing import NamedTuple

from nanotrain_core.api import Costs

#: Number of partial splits kept for every number of layers.
KEPT = 8


def balance(costs: Costs, ranks: Sequence[int]) -> list[int]:
    """Return layers per stage such that the slowest stage is as fast as possible.

    Where ranks have several stages, these come in chunks, one stage of every rank. While a rank runs a stage,
    the others run theirs of the same chunk, on other microbatches, and wait for the slowest. Among splits
    with an equal slowest stage it is therefore one with the least sum over chunks of their slowest stage: two
    stages with one more layer take the time of one layer in the same chunk, and of two in different ones.

    Every stage has a layer, except that the first and the last may contain only an embedding or a head with
    nonzero cost. Of the splits that remain it is one with balanced chunks; then one whose first chunks are
    fastest, since their activations are held longest; then one whose busiest rank has the least load (if
    ranks have several stages, among the :data:`KEPT` best partial splits); then one with balanced stages;
    then the last stage gets the fewest layers, and later ones more, since the first hold most activations.

    Args:
        costs: of a model with at least as many layers as stages.
        ranks: the pipeline rank of each stage.

    >>> balance(Costs(layers=(1.0,) * 10, head=1.5), [0, 1, 2, 3])
    [3, 3, 3, 1]
    >>> balance(Costs(layers=(1.0, 1.0, 1.0, 2.0, 2.0), head=4.0), [0, 1, 2])
    [3, 2, 0]
    >>> balance(Costs(layers=(1.0,) * 8, head=1.5), [0, 1, 0, 1])
    [2, 2, 3, 1]
    """
    return list(_balanced(costs, tuple(ranks)))


class Beginning(NamedTuple):
    """A split over the first stages. Among splits with equally many layers, the smaller is better."""

    busiest: int
    """Load of the busiest rank: the ends of the model, and the layers assigned so far."""
    squares: int
    """Sum over stages of their squared cost: small if they are balanced."""
    in_last: int
    """Layers of the last stage, once assigned."""
    sizes: tuple[int, ...]
    loads: tuple[int, ...]
    """Load of each rank."""

    def then(self, size: int, cost: int, end: int, rank: int, *, final: bool) -> Beginning:
        """Return it with one more stage: ``size`` layers with cost ``cost``, and an end of the model."""
        load = self.loads[rank] + cost
        return Beginning(
            max(self.busiest, load),
            self.squares + (cost + end) ** 2,
            size * final,
            (*self.sizes, size),
            (*self.loads[:rank], load, *self.loads[rank + 1 :]),
        )


@lru_cache(64)  # a plan composes a rank of every stage, and each calls this
def _balanced(costs: Costs, ranks: tuple[int, ...]) -> tuple[int, ...]:
    count, final, pp = len(costs.layers), len(ranks) - 1, max(ranks) + 1
    embedding, head, *layers = as_integers([costs.embedding, costs.head, *costs.layers])
    ends = [0] * len(ranks)
    ends[0] += embedding
    ends[final] += head
    edges = [*accumulate(layers, initial=0)]
    limits = fastest_chunks(edges, [tuple(ends[first : first + pp]) for first in range(0, len(ranks), pp)])
    loads = [0] * pp
    for end, rank in zip(ends, ranks, strict=True):
        loads[rank] += end
    found = {0: [Beginning(max(loads), 0, 0, (), tuple(loads))]}  # by the number of assigned layers
    for stage, (end, rank) in enumerate(zip(ends, ranks, strict=True)):
        longer: dict[int, list[Beginning]] = {}
        for first, last in product(found, range(count + 1)):
            size, cost = last - first, edges[last] - edges[first]
            if size >= (not end) and cost + end <= limits[stage // pp]:
                new = [each.then(size, cost, end, rank, final=stage == final) for each in found[first]]
                longer.setdefault(last, []).extend(new)
        found = {last: sorted(each)[:KEPT] for last, each in longer.items()}
    return found[count][0].sizes


def as_integers(costs: Sequence[float]) -> list[int]:
    """Return costs in a unit of which all are multiples: equal sums are equal, whatever their order.

    >>> as_integers([0.5, 2.0, 0.75])
    [2, 8, 3]
    """
    ratios = [float(cost).as_integer_ratio() for cost in costs]
    unit = max(denominator for _, denominator in ratios)  # all are powers of two
    return [numerator * (unit // denominator) for numerator, denominator in ratios]


def fastest_chunks(edges: Sequence[int], chunks: Sequence[tuple[int, ...]]) -> list[float]:
    """Return the cost of each chunk's slowest stage in the best split.

    It has the least slowest stage; of such splits the least sum over chunks; of these the least sum of
    squares; and then the first list in lexicographical order.

    Args:
        edges: cost of the first 0, 1, 2 ... layers.
        chunks: what the stages of each chunk cost besides their layers; see :func:`slowest_stage`.
    """
    count = len(edges) - 1
    most = slowest_stage(edges, [*chain.from_iterable(chunks)], 0)[count]
    tables = {
        ends: [slowest_stage(edges, ends, first, most) for first in range(count + 1)] for ends in {*chunks}
    }
    # by chunk and its first layer: the least sum, and sum of squares, from there to the last layer
    rest: list[list[tuple[float, float]]] = [[(inf, inf)] * count + [(0, 0)]]
    for ends in reversed(chunks):
        rest.insert(0, [min(map(_plus, rest[0], of_first)) for of_first in tables[ends]])
    first, limits = 0, list[float]()
    for ends, after in zip(chunks, rest[1:], strict=True):
        best = min(map(_plus, after, tables[ends][first]))
        ways = (
            (cost, last) for last, cost in enumerate(tables[ends][first]) if _plus(after[last], cost) == best
        )
        cost, first = min(ways)
        limits.append(cost)
    return limits


def _plus(rest: tuple[float, float], cost: float) -> tuple[float, float]:
    return rest[0] + cost, rest[1] + cost * cost


def slowest_stage(edges: Sequence[int], ends: Sequence[int], first: int, most: float = inf) -> list[float]:
    """Return the cost of the slowest of some stages in the best split of the layers from ``first`` on.

    Args:
        edges: cost of the first 0, 1, 2 ... layers.
        ends: what each stage costs besides its layers; one without such costs has at least one layer.
        first: number of the stages' first layer.
        most: the most that it may cost.

    Returns:
        By number of the layer after their last one; infinity where there is no such split.
    """
    best: list[float] = [inf] * len(edges)
    best[first] = 0
    lowest = first  # the stages so far cannot end before this layer
    for end in ends:
        longer: list[float] = [inf] * len(edges)
        least = 0 if end else 1
        start = lowest
        for last in range(lowest + least, len(edges)):
            # a later start makes this stage faster and those before it slower: the best is where they meet
            while start + least < last and best[start] < edges[last] - edges[start] + end:
                start += 1
            near = (each for each in (start - 1, start) if each >= lowest)
            longer[last] = min(max(best[each], edges[last] - edges[each] + end) for each in near)
        best, lowest = longer, lowest + least
    return [cost if cost <= most else inf for cost in best]
