"""Loads a frozen recipe from a file name: read, merge, resolve, check."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from nanotrain_core.errors import PluginError, Problem, RecipeError
from nanotrain_core.layout.layout import Layout
from nanotrain_core.recipe.merge import Merged
from nanotrain_core.recipe.override_order import components_first
from nanotrain_core.recipe.resolve import Resolver
from nanotrain_core.recipe.source import (
    default_source,
    file_sources,
    find_recipe,
    option_source,
    override_source,
)
from nanotrain_core.recipe.tree import Recipe
from nanotrain_core.recipe.validate import find_problems, remarks
from nanotrain_core.registry.discovery import PluginArguments
from nanotrain_core.registry.registry import Registry, load_plugins


@attrs.define(frozen=True, eq=False)
class Resolution:
    """A recipe that can run, and remarks on it."""

    recipe: Recipe
    registry: Registry
    layout: Layout
    merged: Merged
    """The merged tables, with the origin of each value."""
    notes: tuple[str, ...]
    """Remarks for the user: versions that differ from those a resolved recipe was written with, and possible
    performance improvements."""


def load_recipe(
    path: str | os.PathLike[str],
    *,
    overrides: Sequence[str] = (),
    plugins: PluginArguments = PluginArguments(),  # noqa: B008 (frozen)
    ranks: int | None = None,
) -> Recipe:
    """Return the checked recipe of a file; see :func:`resolve_recipe`."""
    return resolve_recipe(path, overrides=overrides, plugins=plugins, ranks=ranks).recipe


def resolve_recipe(
    path: str | os.PathLike[str],
    *,
    overrides: Sequence[str] = (),
    plugins: PluginArguments = PluginArguments(),  # noqa: B008 (frozen)
    ranks: int | None = None,
    ranks_option: str = "--nproc",
) -> Resolution:
    """Read a recipe, type every section, and check that its components fit together.

    Args:
        path: a file, or the name of a shipped recipe such as ``laptop``.
        overrides: TOML lines that override the file, as from ``--set``.
        plugins: what to load in addition to the installed plugins, and what not to load.
        ranks: world size; None uses the recipe's ``run.ranks``.
        ranks_option: the option of the command line that ``ranks`` is from: errors name it.

    Raises:
        RecipeError: with one line for every problem found, ``file:line: key: what``.
        PluginError: a plugin given by path cannot be loaded.
    """
    registry = load_plugins(block=plugins.blocked, local=plugins.local)
    for plugin in registry.broken:
        if plugin.local:
            raise PluginError(f"--plugin {plugin.module}: {plugin.error}")
    merged = _merge(path, overrides, ranks, ranks_option)
    resolver = Resolver(merged, registry)
    recipe = resolver.recipe()
    if recipe is None:
        files = _missing_files(resolver.written_versions(), registry)
        raise RecipeError([*_lines(merged, resolver.problems), *files])
    layout, problems = find_problems(recipe, registry)
    refuse(merged, problems)
    assert layout is not None
    changed = _changed_versions(merged.label, resolver.written_versions(), recipe.versions)
    notes = (*changed, *remarks(recipe, registry, layout))
    return Resolution(recipe, registry, layout, merged, notes)


def _merge(
    path: str | os.PathLike[str], overrides: Sequence[str], ranks: int | None, ranks_option: str
) -> Merged:
    merged = Merged()
    options = [override_source(number, text) for number, text in enumerate(overrides, start=1)]
    for source in (default_source(), *file_sources(find_recipe(path)), *components_first(options)):
        merged.add(source)
    own = merged.tree.get("run")
    if ranks is not None and not (isinstance(own, dict) and own.get("ranks") == ranks):
        if merged.origin("run.ranks") is not None:
            merged.own_ranks = merged.tree["run"]["ranks"], merged.place("run.ranks")
        merged.add(option_source(ranks_option, "run.ranks", ranks))
    if merged.problems:
        lines = (f"{source.place(p.key)}: {p.key}: {p.message}" for source, p in merged.problems)
        raise RecipeError([*dict.fromkeys(lines)])  # each key of a table that has no place has the same one
    return merged


def refuse(merged: Merged, problems: Sequence[Problem]) -> None:
    """Raise a RecipeError with a line for each problem, if there is any."""
    if problems:
        raise RecipeError(_lines(merged, problems))


def _lines(merged: Merged, problems: Iterable[Problem]) -> list[str]:
    return [f"{merged.place(problem.key)}: {problem.key}: {problem.message}" for problem in problems]


def _missing_files(written: Mapping[str, str], registry: Registry) -> Iterator[str]:
    """Yield the local plugins that a resolved recipe was written with and that are not given now."""
    given = {plugin.distribution for plugin in registry.plugins}
    for name in sorted(set(written) - given):
        if written[name].startswith("sha256-"):
            yield f"this recipe was made with {name}: give --plugin {name}"


def _changed_versions(label: str, written: Mapping[str, str], installed: Mapping[str, str]) -> Iterator[str]:
    """Yield the versions of a resolved recipe that differ from the installed ones."""
    for name, old in written.items():
        now = installed.get(name, "not used")
        if now != old:
            yield f"{label} was resolved with {name} {old}; now {now}"
