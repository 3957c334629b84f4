"""What a check returns: one line for a person, numbers for a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import attrs

Status = Literal["good", "note", "warning", "bad"]
#: From the least to the most urgent. A note is measured or known, and neither good nor bad by what
#: there is to hold it against.
STATUSES: tuple[Status, ...] = ("good", "note", "warning", "bad")


@attrs.define(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    """What was looked at, as ``open files``."""
    status: Status
    text: str
    remedy: str = attrs.field(default="", kw_only=True)
    """What to do; there is one with every ``warning`` and ``bad``."""
    values: Mapping[str, Any] = attrs.field(factory=dict, kw_only=True)
    """Numbers behind the text, in bytes and seconds: plain values for JSON."""
    host: str = attrs.field(default="", kw_only=True)
    """Where, if several hosts were examined."""


def good(check: str, text: str, **values: Any) -> Finding:
    return Finding(check, "good", text, values=values)


def note(check: str, text: str, **values: Any) -> Finding:
    return Finding(check, "note", text, values=values)


def warning(check: str, text: str, remedy: str, **values: Any) -> Finding:
    return Finding(check, "warning", text, remedy=remedy, values=values)


def bad(check: str, text: str, remedy: str, **values: Any) -> Finding:
    return Finding(check, "bad", text, remedy=remedy, values=values)


def worst(found: Iterable[Finding]) -> Status:
    """Return the most urgent status; ``good`` of none."""
    return max((each.status for each in found), key=STATUSES.index, default="good")


def size(count: float) -> str:
    """Return bytes in words.

    >>> [size(n) for n in (512, 64 * 2**20, 3.2e12)]
    ['512 B', '64 MiB', '2.91 TiB']
    """
    value, units = float(count), ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units:
        if value < 1024 or unit == units[-1]:
            break
        value /= 1024
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
