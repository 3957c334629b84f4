"""Buffers of gradient sync, which stay from step to step: a stage has as many as its buckets need.

They do not add up over layers. A rank has a few buckets in flight, however many it sends, and buffers are
used again for buckets of the same length.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from nanotrain_plan.comms import MESSAGES
from nanotrain_plan.dry.rank import RankStep
from nanotrain_plan.dry.step import AROUND

#: Axis and operation of a collective.
Key = tuple[str, str]

#: Buckets that have buffers at once: those in flight in ``layout/buckets.py``, and the one that is written.
IN_FLIGHT = 3


@attrs.define(frozen=True)
class Sent:
    """The buckets that a rank sends along an axis."""

    largest: int
    """Bytes of a bucket."""
    certain: bool
    """Whether a pass sent several buckets of that size: no larger ones can be expected."""
    repeated: bool
    """Whether each microbatch sends them, or the last one alone."""


@attrs.define(frozen=True)
class Buffers:
    """What a rank of a probe showed of the buffers."""

    sent: Mapping[Key, Sent]
    scale: float
    """Bytes of buffers that it had, over those that its buckets need by :func:`needed`."""

    def size(self, parts: Sequence[Mapping[Key, float]], ranks: Callable[[Key], int]) -> tuple[float, float]:
        """Return the bytes of a rank's buffers, and of those how many are a guess.

        Args:
            parts: for each of its stages the bytes that a microbatch sends.
            ranks: that exchange buckets.
        """
        total = guessed = 0.0
        for key, found in self.sent.items():
            sizes = [round(part[key]) for part in parts if part.get(key, 0.0) >= 1.0]
            if not sizes:
                continue
            known = found.certain or max(sizes) <= found.largest
            lengths = [each for size in sizes for each in _cut(size, found.largest if known else size)]
            if ranks(key) > 1:
                own = self.scale * needed(lengths * (IN_FLIGHT if found.repeated else 1), ranks(key))
            else:  # nothing is sent, but a bucket is made and added to the sum
                own = max(lengths) if found.repeated and self.scale else 0.0
            total += own
            guessed += 0.0 if known else own
        return total, guessed


def find_buffers(
    step: RankStep, axis: Callable[[tuple[int, ...], str], str], synced: Iterable[str]
) -> Buffers:
    """Return what a probe's rank shows.

    Args:
        step: of that rank.
        axis: names the mesh dimensions along which ranks differ.
        synced: axes along which gradients are summed.
    """
    synced = set(synced)
    sizes: dict[Key, list[int]] = {}
    ranks: dict[Key, int] = {}
    several: set[tuple[Key, int]] = set()
    actions = [phase for phase in step.phases if phase.name not in AROUND]
    for phase in actions:
        own: Counter[tuple[Key, int]] = Counter()
        for each in phase.collectives:
            key = axis(each.ranks, each.op), each.op
            if key[0] in synced and key[1] not in MESSAGES:
                own[key, each.bytes] += 1
                sizes.setdefault(key, []).append(each.bytes)
                ranks[key] = len(each.ranks)
        several |= {found for found, count in own.items() if count > 1}
    first = [phase for (kind, _, place, _), phase in step.measured.items() if kind != "F" and not place]
    early = {(axis(each.ranks, each.op), each.op) for phase in first for each in phase.collectives}
    needs = sum(needed(found, ranks[key]) for key, found in sizes.items())
    return Buffers(
        sent={key: Sent(max(s), (key, max(s)) in several, key in early) for key, s in sizes.items()},
        scale=sum(phase.lasting for phase in actions if phase.name[0] != "F") / needs if needs else 0.0,
    )


def needed(lengths: Iterable[int], ranks: int) -> float:
    """Return the bytes of buffers for buckets that are sent one after the other, each with a rank's range."""
    flying: deque[int] = deque()
    free: Counter[int] = Counter()
    total = 0
    for each in lengths:
        if free[each]:
            free[each] -= 1
        else:
            total += each
        flying.append(each)
        if len(flying) == IN_FLIGHT:
            free[flying.popleft()] += 1
    return total * (1 + 1 / ranks)


def _cut(size: int, most: int) -> list[int]:
    """Return the lengths of a part's buckets; of whole ones no more than are in flight."""
    whole, rest = divmod(size, most)
    return [most] * min(whole, IN_FLIGHT) + ([rest] if rest else [])
