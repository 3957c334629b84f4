"""``nanotrain inspect RECIPE``: what a recipe's model is, without a run. Adds to the command ``inspect``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from nanotrain_core.api import (
    Exit,
    NanotrainError,
    is_recipe,
    plugin_arguments,
    positive_int,
    resolve_recipe,
)
from nanotrain_plan.hardware import find_hardware, shipped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what goes with a recipe to the options of the command."""
    group = parser.add_argument_group("of a recipe, in place of PATH: its model, without a run")
    group.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change one value of the recipe"
    )
    group.add_argument(
        "--hardware",
        default="h100",
        metavar="NAME|FILE",
        help=f"hardware of the roofline: {', '.join(shipped())}, or your own TOML file (h100)",
    )
    group.add_argument(
        "--batch", type=positive_int, default=1, metavar="N", help="sequences decoded in one batch (1)"
    )
    group.add_argument("--html", metavar="FILE", help="also write an HTML page")


def takes(args: argparse.Namespace) -> bool:
    """Return whether a recipe is meant, and not a folder that has the name of one."""
    return is_recipe(args.path) and not Path(args.path).is_dir()


def run(args: argparse.Namespace) -> int:
    """Print the report.

    Raises:
        NanotrainError: the recipe cannot run, or there is no such hardware.
    """
    if args.other is not None:
        raise NanotrainError(
            f"{args.path} is a recipe: weights are compared with weights, not '{args.other}'"
        )
    from nanotrain_plan.rendering.file import check_page, tell_page, write_page

    check_page(args)
    hardware = find_hardware(args.hardware)
    found = resolve_recipe(args.path, overrides=args.set, plugins=plugin_arguments(args))
    from nanotrain_plan.model_report.report import as_json, report, sections

    made = report(found.recipe, found.registry, found.layout, hardware, batch=args.batch)
    title = f"Model '{found.recipe.model.use}' of {found.recipe.run.name}"
    if args.html:
        from nanotrain_plan.rendering.page import page

        write_page(args, page(title, sections(made)))
    if args.json:
        json.dump(as_json(made), sys.stdout, indent=1)
        print()
    else:
        from nanotrain_plan.rendering.terminal import plain_console, show

        show(title, sections(made), plain_console(160))
    tell_page(args)
    return Exit.DONE
