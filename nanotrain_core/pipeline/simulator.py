"""Simulates when each action of a pipeline schedule runs: bubble and live activations. Torch-free.

The rules are the executor's: a rank runs its list in order, waits for an action's inputs, and sends
without waiting. A backward whose weight gradients are a separate action takes only the time of its
first half.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs

from nanotrain_core.pipeline.actions import Action

#: One time for all stages, or one for each stage.
Time = float | Sequence[float]


@attrs.define(frozen=True, kw_only=True)
class Durations:
    """How long actions take, in any unit: one value, or one for each stage."""

    forward: Time = 1.0
    backward: Time = 1.0
    """Time for the gradient of a stage's input."""
    weight: Time = 1.0
    """Time for the gradients of its weights: added to the backward's where they are not a separate action."""
    p2p: float = 0.0
    """Time from the end of an action to its output's arrival at another rank."""

    def of(self, action: Action, *, split: bool) -> float:
        """Return the time of an action; ``split``: a W computes the weight gradients of this B."""
        if action.kind == "F":
            return _at(self.forward, action.stage)
        if action.kind == "W":
            return _at(self.weight, action.stage)
        rest = 0.0 if split else _at(self.weight, action.stage)
        return _at(self.backward, action.stage) + rest


def _at(time: Time, stage: int) -> float:
    return time[stage] if isinstance(time, Sequence) else time


@attrs.define(frozen=True)
class TimedAction:
    """One action and when it runs."""

    action: Action
    start: float
    end: float


@attrs.define(frozen=True)
class Timeline:
    """The simulated schedule of every rank, from time 0 to the end of the last action."""

    rows: tuple[tuple[TimedAction, ...], ...]
    """The slots by pipeline rank, in the order of its list."""

    @property
    def makespan(self) -> float:
        """The end of the last action."""
        return max((slot.end for row in self.rows for slot in row), default=0.0)

    def busy(self, rank: int) -> float:
        """Return the time in which a rank runs actions."""
        return sum(slot.end - slot.start for slot in self.rows[rank])

    def bubble(self, rank: int | None = None) -> float:
        """Return the fraction of the makespan in which a rank, or all ranks together, are idle."""
        ranks = range(len(self.rows)) if rank is None else [rank]
        available = self.makespan * len(ranks)
        return 1.0 - sum(map(self.busy, ranks)) / available if available else 0.0

    def stages(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, ascending."""
        return tuple(sorted({slot.action.stage for slot in self.rows[rank]}))

    def peak(self, rank: int) -> int:
        """Return the peak number of (stage, microbatch) pairs whose activations a rank holds."""
        return peak([slot.action for slot in self.rows[rank]])


def peak(actions: Sequence[Action]) -> int:
    """Return the peak number of (stage, microbatch) pairs between F and B, or W, in one rank's list."""
    split = _split(actions)
    live = most = 0
    for action in actions:
        live += action.kind == "F"
        most = max(most, live)
        live -= action.kind == "W" or (action.kind == "B" and (action.stage, action.microbatch) not in split)
    return most


def _split(actions: Sequence[Action]) -> set[tuple[int, int]]:
    return {(action.stage, action.microbatch) for action in actions if action.kind == "W"}


def simulate(lists: Sequence[Sequence[Action]], durations: Durations | None = None) -> Timeline:
    """Return when each action of each rank's list runs, all starting at time 0.

    Args:
        lists: ``Schedule.actions``: by pipeline rank. A stage belongs to the rank that runs it.
        durations: of the actions; by default each takes 1, and a backward with both halves 2.

    Raises:
        ValueError: the lists deadlock; the text says which action each rank waits to run.
    """
    times = durations or Durations()
    final = max((action.stage for actions in lists for action in actions), default=0)
    waiting = [list(reversed(actions)) for actions in lists]
    split = [_split(actions) for actions in lists]
    clock = [0.0] * len(lists)
    done: dict[tuple[str, int, int], tuple[float, int]] = {}  # when, and on which rank
    rows: list[list[TimedAction]] = [[] for _ in lists]
    while any(waiting):
        progress = False
        for rank, queue in enumerate(waiting):
            while queue:
                action = queue[-1]
                key = stage, m = action.stage, action.microbatch
                wanted = _needed(action.kind, stage, m, final)
                if not all(need in done for need in wanted):
                    break
                start = clock[rank]
                for need in wanted:
                    end, source = done[need]
                    start = max(start, end if source == rank else end + times.p2p)
                queue.pop()
                clock[rank] = start + times.of(action, split=key in split[rank])
                done[action.kind, stage, m] = clock[rank], rank
                rows[rank].append(TimedAction(action, start, clock[rank]))
                progress = True
        if not progress:
            stuck = ", ".join(f"rank {rank}: {queue[-1]}" for rank, queue in enumerate(waiting) if queue)
            raise ValueError(f"no rank can go on; they wait to run {stuck}")
    return Timeline(tuple(map(tuple, rows)))


def dependencies(action: Action, final: int) -> tuple[Action, ...]:
    """Return the actions that ``action`` depends on; ``final``: number of the last stage."""
    return tuple(Action(*need) for need in _needed(action.kind, action.stage, action.microbatch, final))


def _needed(kind: str, stage: int, m: int, final: int) -> tuple[tuple[Literal["F", "B"], int, int], ...]:
    """Return the same as tuples, which are created and hashed faster than actions."""
    if kind == "F":
        return (("F", stage - 1, m),) if stage else ()
    if kind == "W":
        return (("B", stage, m),)
    own: tuple[Literal["F", "B"], int, int] = ("F", stage, m)
    return (own, ("B", stage + 1, m)) if stage < final else (own,)
