"""Selects where a save is interrupted, and which of its files are damaged: everywhere, or at some points.

A format may have a file for each tensor, and so hundreds of writes and files. What it does for one of them it
does for all, and each attempt costs a save or two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

#: Writes at which a save is interrupted one after the other: at its beginning, and half as many at its end.
EACH = 48
#: Files of one kind that are damaged.
OF_A_KIND = 6


def up_to_the_end(ends_before: Callable[[int], bool]) -> None:
    """Call with write indices, from 1, until a save completes before the one where it is to be interrupted.

    Args:
        ends_before: whether a save, to be interrupted at that write, came to its end. Called once for each.
    """
    for number in range(1, EACH + 1):
        if ends_before(number):
            return
    interrupted, ended = EACH, 2 * EACH
    tried = {ended}
    while not ends_before(ended):
        interrupted, ended = ended, 2 * ended
        tried.add(ended)
    while ended - interrupted > 1:
        middle = (interrupted + ended) // 2
        tried.add(middle)
        if ends_before(middle):
            ended = middle
        else:
            interrupted = middle
    for number in range(max(EACH + 1, ended - EACH // 2), ended):
        if number not in tried:
            ends_before(number)


def of_each_kind(paths: Sequence[Path]) -> list[Path]:
    """Return some paths of each suffix, including the first and the last: all if there are few."""
    kinds: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        kinds[path.suffix].append(path)
    chosen: set[Path] = set()
    for found in kinds.values():
        last, steps = len(found) - 1, min(len(found), OF_A_KIND) - 1
        chosen.update(found[last * n // steps] if steps else found[0] for n in range(steps + 1))
    return [path for path in paths if path in chosen]
