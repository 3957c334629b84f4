"""Recipes: TOML files that specify a run completely, read into one frozen, typed tree.

In the order of processing: ``source`` (files and options), ``merge`` (layers, and the origin of each
value), ``resolve`` and ``structure`` (types and components), ``validate`` (compatibility of components),
``write`` (back to TOML); ``load`` calls them in turn. ``tree`` defines the result.
"""

from typing import TYPE_CHECKING, Any

from nanotrain_core.recipe.tree import Recipe as Recipe

if TYPE_CHECKING:
    from nanotrain_core.recipe.load import load_recipe as load_recipe
    from nanotrain_core.recipe.load import resolve_recipe as resolve_recipe
    from nanotrain_core.recipe.validate import check_combination as check_combination
    from nanotrain_core.recipe.write import recipe_hash as recipe_hash
    from nanotrain_core.recipe.write import recipe_values as recipe_values
    from nanotrain_core.recipe.write import write_resolved as write_resolved

_HOMES = {
    "check_combination": "validate",
    "load_recipe": "load",
    "resolve_recipe": "load",
    "recipe_hash": "write",
    "recipe_values": "write",
    "write_resolved": "write",
}


def __getattr__(name: str) -> Any:
    # Imported late, because plugins import ``recipe.tree`` while the registry that ``load`` needs loads them.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"nanotrain_core.recipe.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
