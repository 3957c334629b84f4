"""Calls a function that a component declares (``check``, ``stays_eager``), and validates what it yields."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeVar, cast, get_args

import attrs

from nanotrain_core.component import Reference
from nanotrain_core.errors import PluginError, as_plugin_error
from nanotrain_core.layout.layout import Layout
from nanotrain_core.recipe.tree import Recipe, Selection
from nanotrain_core.registry.registry import Registry

T = TypeVar("T")


def call_declared(
    name: str,
    selection: Selection,
    recipe: Recipe,
    layout: Layout,
    registry: Registry,
    wanted: type[T],
    more: Mapping[str, Any] = MappingProxyType({}),
) -> list[T]:
    """Return what the function ``name`` of a selected component yields; nothing if it declares none.

    Args:
        name: attribute of :class:`~nanotrain_core.component.Component`, a function of
            ``(recipe, config, layout)`` and ``more``.
        selection: the component, with its config.
        recipe: the checked recipe.
        layout: the layout of its ranks.
        registry: the plugins.
        wanted: the class of what it must yield.
        more: further arguments, by name.

    Raises:
        PluginError: the function itself is wrong: it takes other arguments, raised, or yielded something
            else.
    """
    component = registry.get(selection.kind, selection.use)
    who = f"{selection.kind} '{selection.use}' of {registry.owner(selection.kind, selection.use)}"
    try:
        # Those that need torch are declared as "module:attribute".
        named = name in get_args(Reference)
        function = component.load_optional(cast(Reference, name)) if named else getattr(component, name)
    except PluginError as error:
        raise PluginError(f"{who}: {error}") from error.__cause__
    if function is None:
        return []
    label = f"{who}: its {name}"
    code = function.__code__ if inspect.isfunction(function) else None
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    arguments = (recipe, selection.config, layout, *more.values())
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        expected = ", ".join(("recipe", "config", "layout", *more))
        raise PluginError(f"{label} must take ({expected}): {error}{place}") from None
    with as_plugin_error(label):
        found: Any = function(*arguments)
        results = list(found) if isinstance(found, Iterable) else [found]
    for result in results:
        if not isinstance(result, wanted):
            fields = ", ".join(field.name for field in attrs.fields(wanted)) if attrs.has(wanted) else ""
            form = f"{wanted.__name__}({fields})" if fields else wanted.__name__
            raise PluginError(f"{label} gave {result!r} where it must yield {form}{place}")
    return results


def gpu_refusals(
    recipe: Recipe, registry: Registry, layout: Layout, capability: tuple[int, int]
) -> list[str]:
    """Return why components of a recipe cannot run on GPUs of a compute capability, each by its name.

    Raises:
        PluginError: a component's ``refuses_gpu`` is wrong.
    """
    more, found = {"capability": capability}, list[str]()
    for selection in recipe.selections():
        reasons = call_declared("refuses_gpu", selection, recipe, layout, registry, str, more)
        found += [f"{selection.kind} '{selection.use}': {why}" for why in reasons]
    return found


def patterns_in_configs(
    recipe: Recipe, registry: Registry, name: Literal["reads_metrics", "reads_modules"]
) -> Iterator[tuple[str, str]]:
    """Yield what the configs of components name, each name or pattern after its recipe key.

    Of wrappers, the precision, the optimizer and monitors.

    Raises:
        PluginError: the function ``name`` of a component is wrong.
    """
    selected = [(f"{each.kind}.{number}", each) for number, each in enumerate(recipe.parallel)]
    selected += [("precision", recipe.precision), ("optimizer", recipe.optimizer)]
    selected += [(f"{each.kind}.{number}", each) for number, each in enumerate(recipe.monitor)]
    for table, selection in selected:
        reads = getattr(registry.get(selection.kind, selection.use), name)
        label = f"{selection.kind} '{selection.use}': {name}"
        with as_plugin_error(label):
            found = [*reads(selection.config)] if reads is not None else []
        for each in found:
            if not (isinstance(each, tuple) and len(each) == 2 and all(isinstance(it, str) for it in each)):
                raise PluginError(f"{label} gave {each!r} where it must yield (key, pattern), two strings")
            yield f"{table}.{each[0]}", each[1]
