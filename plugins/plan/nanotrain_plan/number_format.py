"""Numbers as people read them. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence


def size(number: float) -> str:
    """Return bytes in decimal units.

    >>> size(17_123_456_789), size(-512), size(0)
    ('17.1 GB', '-512 B', '0')
    """
    if not number:
        return "0"
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(number) >= factor:
            return f"{_digits(number / factor)} {unit}"
    return f"{number:.0f} B"


def count(number: float) -> str:
    """Return a number with three or four digits.

    >>> count(671_026_419_200), count(124_439_808), count(960)
    ('671.0 B', '124.4 M', '960')
    """
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Return a time.

    >>> duration(0.0123), duration(19.926), duration(86400 * 55)
    ('12.3 ms', '19.9 s', '55.0 days')
    """
    for unit, factor in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * factor:
            return f"{_digits(seconds / factor)} {unit}"
    if seconds >= 1:
        return f"{_digits(seconds)} s"
    return f"{_digits(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def spans(numbers: Sequence[int]) -> str:
    """Return ascending numbers, three or more in a row by the first and the last.

    >>> spans([0, 1, 2, 3, 5, 7, 8]), spans([4])
    ('0 to 3, 5, 7, 8', '4')
    """
    rows: list[list[int]] = []
    for number in numbers:
        if rows and number == rows[-1][-1] + 1:
            rows[-1].append(number)
        else:
            rows.append([number])
    told = ([f"{row[0]} to {row[-1]}"] if len(row) > 2 else map(str, row) for row in rows)
    return ", ".join(word for words in told for word in words)


def starred(name: str) -> str:
    """Return a module's name with a star for each number.

    >>> starred("layers.12.attn.q")
    'layers.*.attn.q'
    """
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _digits(number: float) -> str:
    return (
        f"{number:.2f}" if abs(number) < 10 else f"{number:.1f}" if abs(number) < 1000 else f"{number:,.0f}"
    )
