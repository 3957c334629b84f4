"""Numbers of a command line, as ``type=`` of ``argparse`` options: an error says what was expected."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def whole_number(expected: str, low: int = 0, high: int = 2**63 - 1) -> Callable[[str], int]:
    """Return a reader of whole numbers from ``low`` to ``high``.

    Args:
        expected: what an error says was expected, such as ``a whole number above 0``.
        low: 0 or more: numbers are decimal digits without a sign.
        high: included.
    """

    def read(text: str) -> int:
        if not text.isdecimal() or len(text) > 4000 or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"expected {expected}, got '{text}'")
        return int(text)

    return read


def real_number(expected: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """Return a reader of the finite numbers for which ``fits`` is true.

    Args:
        expected: what an error says was expected, such as ``a fraction from 0 to 1``.
        fits: of a finite number.
    """

    def read(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not (math.isfinite(found) and fits(found)):
            raise argparse.ArgumentTypeError(f"expected {expected}, got '{text}'")
        return found

    return read


def positive_int(text: str) -> int:
    """Read a whole number above 0."""
    return whole_number("a whole number above 0", 1)(text)


def unsigned_int(text: str) -> int:
    """Read 0 or a whole number above it."""
    return whole_number("0 or a whole number above it")(text)
