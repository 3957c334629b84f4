"""What an action does, as numbers that add up: of a stage it is the sum over its blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import attrs

from nanotrain_plan.dry.phase import Phase


@attrs.define(eq=False)
class Work:
    """The work of one action, or of a block's part of it. In differences, values may be negative."""

    change: float = 0.0
    """Bytes alive after it, less those before."""
    made: float = 0.0
    """Bytes made within that are alive after it."""
    host: float = 0.0
    """As :attr:`change`, of the host's memory."""
    moved: float = 0.0
    eager: float = 0.0
    kernels: float = 0.0
    gemm: Counter[str] = attrs.field(factory=Counter)
    """FLOPs by dtype, as :attr:`Phase.gemm_flops`."""
    count: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    """Collectives by axis and operation."""
    sent: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    """Their bytes."""

    def plus(self, other: Work, times: float = 1.0) -> Work:
        """Return the sum with ``other``, so many times."""
        return Work(
            change=self.change + times * other.change,
            made=self.made + times * other.made,
            host=self.host + times * other.host,
            moved=self.moved + times * other.moved,
            eager=self.eager + times * other.eager,
            kernels=self.kernels + times * other.kernels,
            gemm=_plus(self.gemm, other.gemm, times),
            count=_plus(self.count, other.count, times),
            sent=_plus(self.sent, other.sent, times),
        )

    def set(self, key: tuple[str, str], base: Work, *, count: float, sent: float) -> None:
        """Replace the collectives of a kind by those of ``base`` and so many more."""
        counts: Any = self.count
        bytes_: Any = self.sent
        counts[key], bytes_[key] = base.count[key] + count, base.sent[key] + sent

    @classmethod
    def of(cls, phase: Phase, axis: Callable[[tuple[int, ...], str], str]) -> Work:
        """Return what was recorded; ``axis`` names the mesh dimensions along which ranks differ."""
        found = cls(
            change=phase.after - phase.before,
            made=phase.made,
            host=phase.host,
            moved=phase.moved,
            eager=phase.eager,
            kernels=phase.kernels,
            gemm=Counter(phase.gemm_flops),
        )
        for each in phase.collectives:
            key = axis(each.ranks, each.op), each.op
            found.count[key] += 1
            found.sent[key] += each.bytes
        return found


def _plus(mine: Counter[Any], others: Counter[Any], times: float) -> Counter[Any]:
    total: Any = Counter(mine)
    for key, value in others.items():
        total[key] += times * value
    found: Counter[Any] = total
    return found
