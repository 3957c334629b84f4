"""The fault matrix: all rows, and what is not tested."""

from __future__ import annotations

from collections.abc import Sequence

from nanotrain_core.errors import NanotrainError
from nanotrain_core.testing.chaos import (
    corruption,
    death,
    disk,
    memory,
    mistakes,
    numbers,
    several_hosts,
    signals,
    store,
)
from nanotrain_core.testing.chaos.row import Row


def rows_of(*modules: object) -> tuple[type[Row], ...]:
    """Return the rows that modules define, by number."""
    found = (each for module in modules for each in vars(module).values() if isinstance(each, type))
    rows = [each for each in found if issubclass(each, Row) and hasattr(each, "number")]
    return tuple(sorted(rows, key=lambda row: int(row.number.partition("-")[0])))


ROWS = rows_of(death, disk, signals, numbers, corruption, mistakes, store, several_hosts, memory)

#: Rows of the matrix that are not tried, and why.
NOT_RUN = {
    "8 read-only folder": "root may write everywhere; others are refused before a rank starts",
    "22 port busy": "the ranks of one host meet in a file: there is no port",
    "24 tracker offline": "the core talks to none; nanotrain-wandb tests its own",
    "25 clock jump": "the machine's clock is not ours to set; all waiting is by the monotonic clock",
}


def chosen(only: Sequence[str], *, short: bool) -> list[type[Row]]:
    """Return the rows whose number or name has one of ``only`` in it.

    Raises:
        NanotrainError: one of ``only`` is in none.
    """
    rows = [row for row in ROWS if row.short or not short]
    for word in only:
        if not any(_matches(row, word) for row in rows):
            known = ", ".join(f"{row.number} {row.name}" for row in rows)
            raise NanotrainError(
                f"--only {word}: no such row; expected a number or a part of a name of: {known}"
            )
    return [row for row in rows if not only or any(_matches(row, word) for word in only)]


def _matches(row: type[Row], word: str) -> bool:
    return word == row.number or word.lower() in row.name.lower()
