"""``nanotrain check RECIPE``: report every problem of a recipe, without starting anything."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import attrs

from nanotrain_core.cli.common import add_recipe_options, resolve
from nanotrain_core.cli.memory import memory_line
from nanotrain_core.compile.cuda_graphs import explain_passes
from nanotrain_core.errors import Exit
from nanotrain_core.launch.check_inputs import input_problems
from nanotrain_core.launch.check_modules import check_modules
from nanotrain_core.launch.check_weights import check_weights
from nanotrain_core.layout.layout import View
from nanotrain_core.phases.timeline import PhaseTimeline
from nanotrain_core.recipe.load import refuse
from nanotrain_core.recipe.tree import Recipe
from nanotrain_core.recipe.write import explain, plain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_recipe_options(parser)
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        help="also report the memory that the recipe needs there: h100, cpu, ... (needs nanotrain-plan)",
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="print the merged recipe with the origin of each value, and what is compiled",
    )


def run(args: argparse.Namespace) -> int:
    """Print what would run. Problems raise a RecipeError; insufficient memory is a warning.

    With ``--hardware`` memory is printed even if data or weights are missing here.

    Raises:
        NanotrainError: there is no such hardware, or data or weights are missing.
    """
    found = resolve(args)
    missing = input_problems(found)
    if args.explain or not args.hardware:
        refuse(found.merged, missing)
    check_modules(found)
    if not missing:
        check_weights(found)
    if args.explain:
        print(explain(found.recipe, found.merged), end="")
        for line in explain_passes(found.recipe, found.registry, found.layout):
            print(f"# {line}")
        return Exit.DONE
    memory = memory_line(args, found.registry) if args.hardware else ""  # a wrong name fails before "ok"
    print(f"{args.recipe}: {'its data or weights are not right on this machine' if missing else 'ok'}")
    for name, view in found.layout.views.items():
        print(f"  {f'{name} view':11} {_degrees(view)}")
    for selection in found.recipe.selections():
        print(f"  {selection.kind:11} {selection.use}")
    for line in phase_lines(found.recipe):
        print(f"  {line}")
    if memory:
        print(f"  {'memory':11} {memory}", flush=True)
    refuse(found.merged, missing)  # after everything that is known without them
    return Exit.DONE


def phase_lines(recipe: Recipe) -> Iterator[str]:
    """Yield a line for each phase: ``phase 0 grow: to 40,000 tokens, batch.sequences 4 -> 16``."""
    for number, (phase, span) in enumerate(zip(recipe.phase, PhaseTimeline(recipe).spans, strict=True)):
        words = ["to the end of the run" if span.ends is None else f"to {span.ends:,} tokens"]
        for key in phase.changes:
            ramp = span.ramps.get(key)
            words.append(
                f"{key} {_value(span.values[key])}{f' -> {ramp.end} ({ramp.shape})' if ramp else ''}"
            )
        yield f"{f'phase {number} {phase.name}'.rstrip()}: {', '.join(words)}"


def _value(value: Any) -> str:
    """Return a number unchanged, and a table as written in a recipe: ``{factor = 40.0}``."""
    if not attrs.has(type(value)):
        return str(value)
    return f"{{{', '.join(f'{key} = {item}' for key, item in plain(value).items())}}}"


def _degrees(view: View) -> str:
    degrees = " x ".join(f"{dim} {size}" for dim, size in zip(view.dims, view.sizes, strict=True))
    return f"{degrees} = {view.world_size} rank{'s' if view.world_size > 1 else ''}"
