"""Adapts a recipe to the available GPUs, or reports why it does not fit and how it can run."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator

import attrs

from nanotrain_core.cli.common import plugin_arguments
from nanotrain_core.errors import RecipeError
from nanotrain_core.recipe import Recipe, load_recipe
from nanotrain_core.recipe.load import Resolution


def gpus_here() -> int:
    """Return how many GPUs this machine has."""
    import torch

    return torch.cuda.device_count()


def fit_to_gpus(args: argparse.Namespace, found: Resolution) -> Recipe:
    """Return the recipe, with one rank per GPU if it has more ranks than GPUs; the global batch is the same.

    Raises:
        RecipeError: it cannot run on this many ranks; the text says why, and the commands that do run it.
    """
    recipe = found.recipe
    if recipe.run.device == "cpu" or recipe.run.ranks == 1 or recipe.run.share_device:
        return recipe
    gpus = gpus_here()
    if not 0 < gpus < recipe.run.ranks:
        return recipe
    here = f"{_count(gpus, 'GPU')} here"
    problems = list(_misfits(found, gpus))
    try:
        fitted = None if problems else _load(args, gpus)
    except RecipeError as error:
        fitted, problems = None, list(error.lines)
    if fitted is None:
        text = f"{here}, and the recipe, of {recipe.run.ranks} ranks, cannot run on {_count(gpus, 'rank')}:"
        raise RecipeError([text, *problems, *_commands(args, gpus)])
    print(f"nanotrain: {here}, so {_count(gpus, 'rank')} in place of {recipe.run.ranks}", file=sys.stderr)
    return fitted


def _load(args: argparse.Namespace, ranks: int) -> Recipe:
    return load_recipe(args.recipe, overrides=args.set, plugins=plugin_arguments(args), ranks=ranks)


def _misfits(found: Resolution, ranks: int) -> Iterator[str]:
    """Yield the degrees that do not fit this many ranks (those that fail alone, else all), and the reason."""
    selection = found.recipe.topology
    names = [field.name for field in attrs.fields(type(selection.config))]
    values = {name: getattr(selection.config, name) for name in names}
    degrees = {name: value for name, value in values.items() if type(value) is int and value > 1}
    reason = _refusal(found, degrees, {}, ranks)
    if not reason:
        return
    alone = [name for name in degrees if _refusal(found, degrees, {name: degrees[name]}, ranks)]
    for name in alone or degrees:
        yield f"{found.merged.place(f'topology.{name}')}: topology.{name} = {degrees[name]}"
    yield reason


def _refusal(found: Resolution, degrees: dict[str, int], kept: dict[str, int], ranks: int) -> str:
    """Return why the topology rejects this many ranks; an empty string if it accepts them.

    ``kept``: if not empty, all other ``degrees`` are set to 1.
    """
    selection = found.recipe.topology
    if kept:
        changed = attrs.evolve(selection.config, **(dict.fromkeys(degrees, 1) | kept))
        selection = attrs.evolve(selection, config=changed)
    try:
        found.registry.build(selection).layout(ranks)
    except ValueError as error:
        return str(error)
    return ""


def _commands(args: argparse.Namespace, gpus: int) -> Iterator[str]:
    """Yield a command that runs the recipe on fewer of the GPUs, if there is one, and one for the CPU."""
    words = ["nanotrain", *args.words]
    for ranks in range(gpus - 1, 0, -1):
        try:
            _load(args, ranks)
        except RecipeError:
            continue
        yield f"on {_count(ranks, 'GPU')}: {shlex.join([*words, '--nproc', str(ranks)])}"
        break
    yield f"on the CPU: {shlex.join([*words, '--set', 'run.device=cpu'])}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
