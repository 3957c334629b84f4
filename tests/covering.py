"""Chooses few of many objects that together have everything that any of them has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch


def in_pairs(numbers: torch.Tensor) -> torch.Tensor:
    """Return, for rows of numbers of 0 or more, the number of each pair of two columns' numbers."""
    size = int(numbers.max()) + 1
    columns = enumerate(combinations(numbers.unbind(1), 2))
    return torch.stack([(pair * size + first) * size + second for pair, (first, second) in columns], 1)


def numbered(rows: Sequence[Sequence[Any]]) -> torch.Tensor:
    """Return a number for each value of each column: equal values of a column have the same, no others."""
    known: dict[tuple[int, Any], int] = {}
    return torch.tensor([[known.setdefault(choice, len(known)) for choice in enumerate(row)] for row in rows])


def cover(choices: torch.Tensor) -> list[int]:
    """Return rows that together have every choice that any row has.

    Greedy: the next one has the most choices that none before it has, and is the first of several.

    Args:
        choices: ``[rows, choices of each]``, numbers of 0 or more.
    """
    missing = torch.zeros(int(choices.max()) + 1, dtype=torch.uint8)
    missing[choices] = 1
    columns, chosen = choices.T.contiguous(), []  # sums over rows of memory are fastest
    while missing.any():
        best = int(missing[columns].sum(0, dtype=torch.int16).argmax())
        chosen.append(best)
        missing[choices[best]] = 0
    return chosen
