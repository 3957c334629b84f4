"""Reads numbers of the command line: in a wrong one's place it says what is expected before any work.

Torch-free.
"""

from __future__ import annotations

import argparse

from nanotrain_core.api import NanotrainError


def positive(text: str) -> int:
    """Read a whole number above 0, for ``argparse``, as the functions below."""
    return _whole(text, "a whole number above 0", 1)


def count(text: str) -> int:
    """Read a number of things to draw."""
    return _whole(text, "a whole number from 1 to 1,000,000", 1, 1_000_000)


def seed(text: str) -> int:
    """Read a seed, as torch takes it."""
    return _whole(text, "a whole number from 0 to 2^63 - 1", 0)


def share(text: str) -> float:
    """Read a fraction."""
    return _number(text, "a fraction from 0 to 1", 0.0, 1.0)


def factor(text: str) -> float:
    """Read by how much something takes longer."""
    return _number(text, "a number from 1 to 1000", 1.0, 1000.0)


def amount(text: str) -> float:
    """Read a number of hours or minutes."""
    return _number(text, "a number above 0, at most a million", 1e-6, 1e6)


def _number(text: str, expected: str, low: float, high: float) -> float:
    try:
        found = float(text)
    except ValueError:
        found = float("nan")
    if not low <= found <= high:
        raise argparse.ArgumentTypeError(f"expected {expected}, got '{text}'")
    return found


def _whole(text: str, expected: str, low: int, high: int = 2**63 - 1) -> int:
    if not text.isdecimal() or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"expected {expected}, got '{text}'")
    return int(text)


def world_size(args: argparse.Namespace) -> tuple[int | None, str]:
    """Return the number of ranks to plan for, None for the recipe's, and the options that it is from.

    Raises:
        NanotrainError: it is given twice.
    """
    given = [option for option in ("--nproc", "--nnodes") if getattr(args, option[2:]) is not None]
    launched = (args.nproc or 1) * (args.nnodes or 1) if given else None
    if args.ranks is None:
        return launched, " x ".join(given)
    if launched not in (None, args.ranks):
        both = f"{' x '.join(given)} = {launched}"
        raise NanotrainError(f"--ranks {args.ranks}, but {both}: give one of them")
    return args.ranks, "--ranks"
