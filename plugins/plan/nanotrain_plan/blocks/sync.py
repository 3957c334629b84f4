"""Gradient sync of blocks: sent in the last microbatch's pass, in proportion to their parameters.

Buckets hold gradients of several layers, and start in an order. A probe runs its stages one after the other,
so when it sends a bucket, or whether only after all of them, tells nothing about the stages of a pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from nanotrain_plan.blocks.buffers import Key
from nanotrain_plan.blocks.work import Work
from nanotrain_plan.dry.held import Share
from nanotrain_plan.dry.rank import RankStep

#: Kind of an action, whether its microbatch is the first, another or the last, and whether it has a W pass.
Pass = tuple[str, int, bool]


class GradientSync:
    """What a rank of a probe sends once a step, for each element of its parameters.

    Not what it sends after all passes only, as sync does that is not overlapped, or that of tied parameters.
    """

    def __init__(self, step: RankStep, axis: Callable[[tuple[int, ...], str], str]) -> None:
        """``axis`` names the mesh dimensions along which ranks differ."""
        sums = Counter[Key](), Counter[Key]()
        overlapped: set[Key] = set()
        for (kind, stage, place, split), phase in step.measured.items():
            usual = step.measured.get((kind, stage, 1, split))
            if place == 2 and kind != "F" and usual is not None:
                work = Work.of(phase, axis)
                overlapped |= work.sent.keys()
                _add(sums, work.plus(Work.of(usual, axis), -1.0))
        _add(sums, Work.of(step.around["sync"], axis))
        held = Counter[str]()
        for (_, dims), share in step.shares.items():
            held[_name(dims)] += share.elements
        synced = {key for key in sums[0] if held[key[0]] and "pp" not in key[0].split("+")}
        self.count, self.sent = (
            {key: total / held[key[0]] for key, total in each.items() if key in overlapped & synced}
            for each in sums
        )

    def give(self, works: Mapping[Pass, Work], shares: Mapping[tuple[str, ...], Share]) -> None:
        """Change the last microbatch's passes of a block with these parameters."""
        for (kind, place, split), work in works.items():
            usual = works.get((kind, 1, split))
            if place != 2 or kind == "F" or usual is None:
                continue
            computes = kind == "W" or not split
            for dims, share in shares.items():
                elements = share.elements if computes else 0
                for key in [key for key in self.sent if key[0] == _name(dims)]:
                    work.set(key, usual, count=elements * self.count[key], sent=elements * self.sent[key])

    def take(self, work: Work) -> None:
        """Remove from what follows all passes what :meth:`give` distributes."""
        for key in self.sent:
            work.set(key, Work(), count=0.0, sent=0.0)


def _add(sums: Iterable[Counter[Key]], work: Work) -> None:
    for total, own in zip(sums, (work.count, work.sent), strict=True):
        for key, value in own.items():
            total[key] += value


def _name(dims: tuple[str, ...]) -> str:
    return "+".join(dims)
