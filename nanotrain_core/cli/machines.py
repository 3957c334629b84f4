"""Checks ``--min-nnodes``: the recipe must run on every number of machines that it allows."""

from __future__ import annotations

import argparse

from nanotrain_core.cli.common import plugin_arguments
from nanotrain_core.errors import NanotrainError, RecipeError
from nanotrain_core.recipe import Recipe
from nanotrain_core.recipe.load import resolve_recipe


def fewest_machines(args: argparse.Namespace, recipe: Recipe) -> int:
    """Return the minimum number of machines, after checking that the recipe runs on each number of them.

    Raises:
        NanotrainError: the minimum is above ``--nnodes``, or the recipe does not run on one of the numbers,
            for example because the degrees of its layout do not divide the ranks.
    """
    most = args.nnodes or 1
    least = most if args.min_nnodes is None else args.min_nnodes
    if least > most:
        raise NanotrainError(f"--min-nnodes {least}: expected at most --nnodes, which is {most}")
    for machines in range(least, most):
        ranks = recipe.run.ranks // most * machines
        try:
            resolve_recipe(args.recipe, overrides=args.set, plugins=plugin_arguments(args), ranks=ranks)
        except RecipeError as problem:
            text = f"the recipe does not run on the ranks of {machines}: {problem}"
            raise NanotrainError(f"--min-nnodes {least}: {text}") from None
    return least
