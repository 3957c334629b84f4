"""``nanotrain check RECIPE``: every problem of a recipe, without starting anything."""

from __future__ import annotations

import argparse

from nanotrain_core.cli.common import add_recipe_options, resolve
from nanotrain_core.compile.eager import explain_compiled
from nanotrain_core.errors import Exit
from nanotrain_core.launch.inputs import check_inputs
from nanotrain_core.layout.layout import View
from nanotrain_core.recipe.write import explain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_recipe_options(parser)
    parser.add_argument(
        "--explain",
        action="store_true",
        help="print the merged recipe with the origin of each value, and what is compiled",
    )


def run(args: argparse.Namespace) -> int:
    """Print what would run. Problems end in a RecipeError."""
    found = resolve(args)
    check_inputs(found)
    if args.explain:
        print(explain(found.recipe, found.merged), end="")
        for line in explain_compiled(found.recipe, found.registry, found.layout):
            print(f"# {line}")
        return Exit.DONE
    print(f"{args.recipe}: ok")
    for name, view in found.layout.views.items():
        print(f"  {f'{name} view':11} {_degrees(view)}")
    for selection in found.recipe.selections():
        print(f"  {selection.kind:11} {selection.use}")
    return Exit.DONE


def _degrees(view: View) -> str:
    degrees = " x ".join(f"{dim} {size}" for dim, size in zip(view.dims, view.sizes, strict=True))
    return f"{degrees} = {view.world_size} rank{'s' if view.world_size > 1 else ''}"
