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
    columns, first = [], 0
    for column in zip(*rows, strict=True):
        known = {value: number for number, value in enumerate(dict.fromkeys(column), first)}
        columns.append(torch.tensor([known[value] for value in column]))
        first += len(known)
    return torch.stack(columns, 1)


def cover(choices: torch.Tensor) -> list[int]:
    """Return rows that together have every choice that any row has.

    Greedy: the next one has the most choices that none before it has, and is the first of several.

    Args:
        choices: ``[rows, choices of each]``, numbers of 0 or more, each in one column alone.
    """
    missing = torch.zeros(int(choices.max()) + 1, dtype=torch.bool)
    missing[choices] = True
    columns, chosen = choices.T.contiguous(), []
    gains = torch.full((len(choices),), len(columns), dtype=torch.int16)
    while missing.any():
        best = int(gains.argmax())
        chosen.append(best)
        for column, choice in zip(columns, choices[best], strict=True):
            if missing[choice]:
                missing[choice] = False
                gains -= (column == choice).to(torch.int16)
    return chosen
