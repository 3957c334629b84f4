"""``nanotrain explain RECIPE``: one step of this recipe in words, pictures and numbers."""

from __future__ import annotations

import argparse
import json
import sys

from nanotrain_core.api import (
    Exit,
    NanotrainError,
    add_recipe_options,
    plugin_arguments,
    resolve,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_recipe_options(parser)
    parser.add_argument(
        "--on",
        choices=("cpu", "gpu"),
        help="device of the ranks: CPUs, with gloo, or GPUs, with NCCL (gpu; for --trace cpu)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON: docs/explain.md lists the keys")
    parser.add_argument("--html", metavar="FILE", help="also write an HTML page with diagrams")
    parser.add_argument(
        "--trace",
        action="store_true",
        help="also train here, with gloo, and compare the actual collectives; exit code 2 if they differ",
    )


def run(args: argparse.Namespace) -> int:
    """Print the explanation.

    Raises:
        NanotrainError: the recipe cannot run; or it is too large to be traced here.
    """
    from nanotrain_plan.rendering.file import check_page, tell_page, write_page

    check_page(args)
    on = args.on or ("cpu" if args.trace else "gpu")
    if args.trace and on == "gpu":
        raise NanotrainError("--trace trains on CPUs, with gloo: leave out --on gpu")
    found = resolve(args)
    from nanotrain_plan.explain.explain import as_json, explain

    if args.trace:
        from nanotrain_plan.explain.shrink import check_small

        check_small(args.recipe, args.set, plugin_arguments(args), found)
        from nanotrain_plan.explain.trace import Progress, compare, section_of

        progress = Progress()
        progress("explaining the recipe from a dry step")
    sections = explain(found.recipe, found.registry, found.layout, host=on == "cpu")
    trace = None
    if args.trace:
        trace = compare(args, plugin_arguments(args), found, progress)
        sections.append(section_of(trace))
    count, devices = found.layout.world_size, {"cpu": "CPU with gloo", "gpu": "GPU with NCCL"}[on]
    title = f"One step of {found.recipe.run.name}: {count:,} x {devices}"
    if args.html:
        from nanotrain_plan.rendering.page import page

        write_page(args, page(title, sections))
    if args.json:
        table = as_json(found.recipe, found.layout, sections)
        if trace is not None:
            table["trace"] = trace.as_json()
        json.dump(table, sys.stdout, indent=1)
        print()
    else:
        from nanotrain_plan.rendering.terminal import plain_console, show

        show(title, sections, plain_console(140))
    tell_page(args)
    return Exit.USER if trace is not None and not trace.same else Exit.DONE
