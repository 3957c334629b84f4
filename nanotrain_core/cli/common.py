"""Shared code of several commands: their options, and how they find a checkpoint."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path

from nanotrain_core.checkpoint.info import CheckpointInfo
from nanotrain_core.checkpoint.listing import listed_of_all
from nanotrain_core.cli.argument_types import positive_int
from nanotrain_core.errors import CheckpointError, shortened
from nanotrain_core.recipe.load import Resolution, resolve_recipe
from nanotrain_core.registry.discovery import PluginArguments
from nanotrain_core.registry.registry import Registry
from nanotrain_core.run.suggest_run import did_you_mean_weights

#: Width of a table when no terminal limits it: one line for each row.
PIPED_WIDTH = 1000


def add_plugin_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--plugin`` and ``--no-plugin``, unless the parser has them."""
    for option, metavar, text in (
        ("--plugin", "PATH", "also load this file or folder as a plugin"),
        ("--no-plugin", "NAME", "do not load this plugin"),
    ):
        with suppress(argparse.ArgumentError):  # the option already exists
            parser.add_argument(option, action="append", default=[], metavar=metavar, help=text)


def plugin_arguments(args: argparse.Namespace) -> PluginArguments:
    """Return the values of ``--plugin`` and ``--no-plugin``."""
    return PluginArguments(local=args.plugin, blocked=args.no_plugin)


def tell_broken(registry: Registry) -> None:
    """Print on stderr which plugins could not be loaded, and why."""
    for plugin in registry.broken:
        print(f"nanotrain: {plugin} is broken: {plugin.error}", file=sys.stderr)


def add_recipe_options(parser: argparse.ArgumentParser) -> None:
    """Add RECIPE and the options that change it."""
    parser.add_argument("recipe", metavar="RECIPE", help="a TOML file, or the name of a shipped recipe")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one value, for example optimizer.lr=1e-4 or parallel.0.overlap=false",
    )
    parser.add_argument("--nproc", type=positive_int, metavar="N", help="ranks on each machine")
    parser.add_argument("--nnodes", type=positive_int, metavar="N", help="machines")
    add_plugin_options(parser)


def ranks(args: argparse.Namespace) -> int | None:
    """Return the world size requested by ``--nproc`` and ``--nnodes``, None if neither is given."""
    if args.nproc is None and args.nnodes is None:
        return None
    return (args.nproc or 1) * (args.nnodes or 1)


def ranks_option(args: argparse.Namespace) -> str:
    """Return the options that :func:`ranks` comes from, as errors name them."""
    given = [option for option in ("--nproc", "--nnodes") if getattr(args, option[2:]) is not None]
    return " x ".join(given)


def resolve(args: argparse.Namespace) -> Resolution:
    """Load and check the recipe of a command that has the recipe options; print its notes to stderr."""
    found = resolve_recipe(
        args.recipe,
        overrides=args.set,
        plugins=plugin_arguments(args),
        ranks=ranks(args),
        ranks_option=ranks_option(args),
    )
    for note in found.notes:
        print(f"nanotrain: note: {shortened(note)}", file=sys.stderr)
    return found


def find_checkpoints(
    path: Path, registry: Registry, step: int | None = None
) -> list[tuple[str, CheckpointInfo]]:
    """Return (format, checkpoint) of all that ``path`` contains, or of one step; oldest first.

    Raises:
        CheckpointError: there is none.
    """
    if not path.exists():
        near = did_you_mean_weights(path)
        raise CheckpointError(
            f"{path}: no such file or folder{near}; expected a run folder, or a checkpoint in it"
        )
    kinds = [use for use in registry.names("checkpoint") if registry.get("checkpoint", use).listing]
    found = listed_of_all(path, registry)
    chosen = [item for item in found if step in (None, item[1].step)]
    if not chosen:
        known = ", ".join(str(saved.step) for _, saved in found) or "none"
        wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        raise CheckpointError(
            f"{path} does not hold {wanted}; steps there: {known}; kinds looked for: {', '.join(kinds)}"
        )
    return chosen


def find_checkpoint(path: Path, registry: Registry, step: int | None = None) -> tuple[str, CheckpointInfo]:
    """Return (format, checkpoint) of the newest that ``path`` contains, or of one step.

    Raises:
        CheckpointError: there is none, or two formats have one of that step.
    """
    found = find_checkpoints(path, registry, step)
    use, newest = found[-1]
    same = sorted({saved.path for _, saved in found if saved.step == newest.step})
    if len(same) > 1:
        several = " and ".join(map(str, same))
        raise CheckpointError(
            f"{path} has checkpoints of several kinds of step {newest.step}: {several}; name one by its path"
        )
    return use, newest
