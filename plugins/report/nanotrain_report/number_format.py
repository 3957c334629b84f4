"""Numbers as people read them."""

from __future__ import annotations

import math
import re
import time


def number(value: float, digits: int = 4) -> str:
    """Return a number with so many digits that count, thousands parted: ``1,672,896``, ``2.1e-05``.

    >>> [number(x) for x in (1672896, 2.10011, 0.0000213, 12.0, 3e60, float("nan"))]
    ['1,672,896', '2.1', '2.13e-05', '12', '3e+60', 'NaN']
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    if abs(value) >= 1e15:
        return f"{value:.{digits}g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def quantity(value: float, unit: str) -> str:
    """Return a number with its unit, in a form that fits the unit."""
    if unit in ("bytes", "B"):
        return size(value)
    if unit in BINARY:
        return binary(value * BINARY[unit])
    if unit == "s":
        return duration(value)
    if unit == "1" or not unit:
        return number(value)
    return f"{number(value)} {unit}"


#: Units of bytes in powers of 1024.
BINARY = {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}


def binary(value: float) -> str:
    """Return bytes in a binary unit that fits: ``423 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:,.3g} TiB"


def size(value: float) -> str:
    """Return bytes in a unit that fits: ``20.2 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} TB"


def duration(seconds: float) -> str:
    """Return seconds in units that fit: ``3.2 ms``, ``41 s``, ``2 h 05 min``."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, hours = round(seconds / 60), int(seconds // 3600)
    if hours < 1:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60:02} min" if hours < 48 else f"{hours / 24:.1f} days"


def share(value: float) -> str:
    """Return a share in percent."""
    return f"{100 * value:.0f}%" if value >= 0.01 or value == 0 else f"{100 * value:.1g}%"


def moment(seconds: float) -> str:
    """Return a time since 1970 as date and time of this machine."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def capital(text: str, *names: str) -> str:
    """Return a sentence with a capital first, unless it begins with a name: ``layers.0``, ``a/b``, ``x_y``.

    Args:
        names: others that it may begin with.

    >>> [capital(x, "embed") for x in ("the loss rises", "layers.0.attn is dead", "embed is dead")]
    ['The loss rises', 'layers.0.attn is dead', 'embed is dead']
    """
    first = text.split(maxsplit=1)[0] if text.strip() else ""
    if first in names or re.search(r"[\w][./_][\w]|\d", first):
        return text
    return text[:1].upper() + text[1:]


def plural(count: int, word: str) -> str:
    """Return ``1 rank`` or ``8 ranks``."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
