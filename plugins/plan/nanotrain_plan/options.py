"""Reads numbers of the command line: in a wrong one's place it says what is expected before any work.

Torch-free.
"""

from __future__ import annotations

import argparse

from nanotrain_core.api import NanotrainError, real_number, whole_number

#: Things to draw.
count = whole_number("a whole number from 1 to 1,000,000", 1, 1_000_000)
#: As torch takes it.
seed = whole_number("a whole number from 0 to 2^63 - 1")
share = real_number("a fraction from 0 to 1", lambda number: 0 <= number <= 1)
#: By how much something takes longer.
factor = real_number("a number from 1 to 1000", lambda number: 1 <= number <= 1000)
#: Hours or minutes.
amount = real_number("a number above 0, at most a million", lambda number: 1e-6 <= number <= 1e6)


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
