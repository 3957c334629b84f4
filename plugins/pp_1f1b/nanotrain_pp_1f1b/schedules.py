"""The orders of pipeline schedules: pure functions that return one rank's list of actions.

In each, a stage runs the microbatches in ascending order, forward and backward. Hence an order without
deadlock stays so if one of its microbatches is removed: :func:`dualpipe_v` uses that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, count, pairwise
from typing import Literal

from nanotrain_core.api import Action

Order = tuple[Action, ...]


def gpipe(rank: int, microbatches: int) -> Order:
    """All forward passes, then all backward passes.

    Source: Huang et al., "GPipe", arXiv 1811.06965, section 2.3.
    """
    return alternate(microbatches, passes("F", rank, microbatches), passes("B", rank, microbatches))


def one_forward_one_backward(pp: int, rank: int, microbatches: int) -> Order:
    """As many forward passes as there are later stages, then one forward and one backward in turn.

    Rank r never holds activations of more than pp - r microbatches.

    Source: Harlap et al., "PipeDream", arXiv 1806.03377 (work scheduling), with a flush after every step:
    Narayanan et al., arXiv 2104.04473, section 2.2.1.
    """
    return alternate(pp - 1 - rank, passes("F", rank, microbatches), passes("B", rank, microbatches))


def interleaved(pp: int, rank: int, microbatches: int, v: int) -> Order:
    """1F1B over v stages on each rank: r, r + pp, r + 2 pp and so on.

    A rank runs a group of microbatches through its first stage, then the same group through its
    second. While the last of a group is in one stage the first returns for the next, if a group has
    pp microbatches. The paper requires a multiple of pp; here groups have *at least* pp, of nearly equal
    size, the larger ones first, and idle time is the same for every number of microbatches from pp on.

    The warm-up of rank r is the largest group in all stages but one, and two for each later rank: the last
    rank's first backward runs when its first microbatch is through, that of the rank before it one forward
    and one backward later.

    Source: Narayanan et al., arXiv 2104.04473, section 2.2.2.
    """
    groups = divide(microbatches, max(1, microbatches // pp))
    mine = [chunk * pp + rank for chunk in range(v)]
    forward = [Action("F", stage, m) for group in groups for stage in mine for m in group]
    backward = [Action("B", stage, m) for group in groups for stage in reversed(mine) for m in group]
    return alternate((v - 1) * len(groups[0]) + 2 * (pp - 1 - rank), forward, backward)


def zb_h1(pp: int, rank: int, microbatches: int) -> Order:
    """1F1B in which rank r defers weight gradients by r microbatches.

    A stage sends the gradient of its input sooner, and fills gaps at the end with the deferred wgrads. Every
    rank holds activations of at most pp microbatches, as the first rank of 1F1B does: pp - r between F and B,
    r more between B and W.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 2.1 (ZB-H1).
    """
    order: list[Action] = []
    for action in one_forward_one_backward(pp, rank, microbatches):
        order.append(action)
        if action.kind == "B" and action.microbatch >= rank:
            order.append(Action("W", rank, action.microbatch - rank))
    put_off = range(max(0, microbatches - rank), microbatches)
    return (*order, *(Action("W", rank, m) for m in put_off))


def dualpipe_v(pp: int, rank: int, microbatches: int) -> Order:
    """Stages along a V: rank r holds stage r on the way down and stage 2 pp - 1 - r on the way up.

    The loss is on rank 0, where a backward can follow immediately. In the steady state each rank runs F down,
    B up, F up, B down, so that a forward is always paired with a backward of another microbatch, whose
    communication it can hide. Before and after it, with b ranks below this one:

    - fill: 2 b microbatches down, then a down and an up for this rank and each above it;
    - before the steady state the b backward passes defer their weight gradients just until the input's
      gradient is sent, because the ranks below wait for it;
    - drain: the remaining backward passes, up and down; the weight gradients of the last ones wait
      for the gaps and the end.

    With fewer than 2 pp microbatches it is the order of 2 pp without the missing ones.

    Source: the "cut-in-half" of Qi et al. (Sea AI Lab) applied to DualPipe, DeepSeek-V3, arXiv 2412.19437,
    section 3.2.1; phases derived from the schedule shown in DeepSeek's DualPipe repository (DualPipeV).
    """
    total = max(microbatches, 2 * pp)
    below, up_to_here = pp - 1 - rank, rank + 1
    steady = total - 2 * pp + up_to_here
    drain = ["B up", "B down"] * up_to_here
    phases = [
        ["F down"] * (2 * below),
        ["F down", "F up"] * up_to_here,
        ["b up", "W", "F up"] * below,
        ["F down", "B up", "F up", "B down"] * steady,
        ["B up", "F up", "B down"] * below,
        drain[:up_to_here],
        [step.lower() for step in drain[up_to_here:]],
        ["W", "b down"] * below,
        ["W"] * up_to_here,
    ]
    stages = {"down": rank, "up": 2 * pp - 1 - rank}
    order = number(chain.from_iterable(phases), stages)
    return tuple(action for action in order if action.microbatch < microbatches)


def number(steps: Iterator[str], stages: dict[str, int]) -> Iterator[Action]:
    """Yield the actions of steps such as ``F up``: each kind takes a stage's microbatches in order.

    ``b`` is a backward that defers its weight gradients; a ``W`` computes the oldest deferred ones.
    """
    counters = {(kind, way): count() for kind in "FB" for way in stages}
    own: dict[str, tuple[Literal["F", "B"], int, Iterator[int]]] = {
        f"{kind} {way}": ("F" if kind == "F" else "B", stage, counters[kind.upper(), way])
        for kind in "FBb"
        for way, stage in stages.items()
    }
    put_off: deque[tuple[int, int]] = deque()
    for step in steps:
        if step == "W":
            yield Action("W", *put_off.popleft())
            continue
        kind, stage, microbatches = own[step]
        m = next(microbatches)
        if step[0] == "b":
            put_off.append((stage, m))
        yield Action(kind, stage, m)


def passes(kind: str, stage: int, microbatches: int) -> list[Action]:
    """Return one action for each microbatch, in order."""
    assert kind in ("F", "B")
    return [Action("F" if kind == "F" else "B", stage, m) for m in range(microbatches)]


def alternate(warm_up: int, forward: Sequence[Action], backward: Sequence[Action]) -> Order:
    """Return ``warm_up`` forward passes, then forward and backward in turn, then the remaining backwards."""
    warm_up = min(warm_up, len(forward))
    steady = chain.from_iterable(zip(forward[warm_up:], backward, strict=False))
    return (*forward[:warm_up], *steady, *backward[len(forward) - warm_up :])


def divide(microbatches: int, groups: int) -> list[range]:
    """Return consecutive groups of nearly equal size, the larger ones first.

    >>> divide(7, 2)
    [range(0, 4), range(4, 7)]
    """
    size, larger = divmod(microbatches, groups)
    starts = [group * size + min(group, larger) for group in range(groups + 1)]
    return [range(first, last) for first, last in pairwise(starts)]
