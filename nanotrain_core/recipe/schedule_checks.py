"""Checks, before anything runs, that a schedule's stages and actions make up one step of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

from nanotrain_core.pipeline.actions import Action, Costs, Part, parts_between
from nanotrain_core.pipeline.simulator import simulate


def expect_one_step(schedule: Any, *, layers: int | None, pp: int, microbatches: int) -> None:
    """Require stages, if ``layers`` is known, and actions: each pass once, in an order that can run.

    Raises:
        ValueError: the text names the first rank, stage or action that is wrong.
    """
    parts = () if layers is None else schedule.parts(Costs.alike(layers), pp)
    held = [layer for part in parts for layer in range(part.first, part.last)]
    if held != list(range(layers or 0)):
        raise ValueError(f"its stages hold layers {held}; expected 0 to {layers} - 1, each once, in order")
    wanted = parts_between([0, *(part.last for part in parts)], [part.rank % pp for part in parts])
    if [*parts] != [*wanted]:
        raise ValueError(
            f"its stages are {', '.join(map(str, parts))}; expected {', '.join(map(str, wanted))}"
        )
    lists = expect_each_pass(schedule, pp=pp, microbatches=microbatches, parts=parts)
    simulate(lists)
    _expect_one_order(lists)


def expect_each_pass(
    schedule: Any, *, pp: int, microbatches: int, parts: Sequence[Part] = ()
) -> Sequence[Sequence[Action]]:
    """Return every rank's actions, checking that each pass occurs once. Cheaper than :func:`expect_one_step`.

    Raises:
        ValueError: the text names the first rank or action that is wrong.
    """
    lists: Sequence[Sequence[Action]] = schedule.actions(pp, microbatches)
    if len(lists) != pp:
        raise ValueError(f"it has actions for {len(lists)} ranks; expected pp = {pp}")
    for rank, actions in enumerate(lists):
        mine = {stage for stage, part in enumerate(parts) if part.rank == rank}
        ran = {action.stage for action in actions}
        _expect_each_once(rank, actions, mine if parts else ran, microbatches)
    return lists


def _expect_each_once(rank: int, actions: Sequence[Action], stages: set[int], microbatches: int) -> None:
    passes = [(action.kind, action.stage, action.microbatch) for action in actions]  # tuples hash faster
    found = set(passes)
    each = list(product(stages, range(microbatches)))
    wanted = {(kind, *one) for kind in ("F", "B") for one in each}
    wrong: dict[str, set[tuple[Any, ...]]] = {
        "lacks": wanted - found,
        "has what is not its own:": found - wanted - {("W", *one) for one in each},
    }
    if len(found) < len(passes):
        wrong["has more than once"] = {one for one, times in Counter(passes).items() if times > 1}
    for what, which in wrong.items():
        if which:
            first = min(str(Action(*one)) for one in which)
            raise ValueError(f"rank {rank} {what} {first} (kind, stage, microbatch)")


def _expect_one_order(lists: Sequence[Sequence[Action]]) -> None:
    """Require the same microbatch order in communicating stages: messages are received in order."""
    rank_of = {action.stage: rank for rank, actions in enumerate(lists) for action in actions}
    for pair in pairwise(sorted(rank_of)):
        for kind in "FB" if rank_of[pair[0]] != rank_of[pair[1]] else "":
            runs = [[a.microbatch for a in lists[rank_of[s]] if (a.kind, a.stage) == (kind, s)] for s in pair]
            if runs[0] != runs[1]:
                text = "stage {0} runs {2} of {3}, stage {1} of {4}; expected one order"
                raise ValueError(text.format(*pair, kind, *runs))
