"""Two calls on one device in turns, timed by the device's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import attrs

from benchmarks.report import spread

Call = Callable[[], Any]

#: Cycles, about 10 ms, for which the device is busy before it begins. Meanwhile the host launches what is
#: timed, so that its time is that of kernels: a launch takes up to half as long as to round a tensor.
AHEAD = 20_000_000


@attrs.define(frozen=True)
class Raced:
    """Seconds of a call of each side, round by round."""

    ours: list[float]
    theirs: list[float]

    @property
    def ratios(self) -> list[float]:
        """Above 1 where ours is faster."""
        return [b / a for a, b in zip(self.ours, self.theirs, strict=True)]

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    def cells(self, scale: Callable[[float], float], form: str) -> dict[str, str]:
        """Return cells of a row: both sides' medians as ``scale`` has them, the ratio and its spread."""
        ours, theirs = (format(scale(median(side)), form) for side in (self.ours, self.theirs))
        return {
            "ours": ours,
            "theirs": theirs,
            "ratio": f"{self.ratio:.2f}",
            "spread": spread(self.ratios, ".2f"),
        }


def turns(ours: Call, theirs: Call, *, rounds: int, calls: int = 10, device: str = "cuda") -> Raced:
    """Let both take turns of so many ``calls``; who begins alternates."""
    sides = (ours, theirs)
    found: tuple[list[float], list[float]] = ([], [])
    for side in sides * 3:  # compiled, and chosen by the libraries
        side()
    for turn in range(rounds):
        for number in (1, 0) if turn % 2 else (0, 1):
            found[number].append(seconds(sides[number], calls, device))
    return Raced(*found)


def seconds(call: Call, calls: int, device: str = "cuda") -> float:
    """Return seconds of one of so many calls after one another."""
    if device == "cpu":
        began = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - began) / calls
    import torch

    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD)
    first.record()
    for _ in range(calls):
        call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / calls
