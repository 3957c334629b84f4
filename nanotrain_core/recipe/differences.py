"""How the recipe of a checkpoint differs from that of a run that would resume from it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import attrs
import tomli

from nanotrain_core.component import LISTED_KINDS
from nanotrain_core.errors import CheckpointError
from nanotrain_core.recipe.model_table import differences
from nanotrain_core.recipe.tree import SAME_ON_RESUME, OptimizerConfig, Recipe
from nanotrain_core.recipe.write import plain

#: Keys of every optimizer: none of them adds state.
RATES = frozenset(field.name for field in attrs.fields(OptimizerConfig))
#: How many differences an error names.
MOST = 4
BEGIN_ANEW = "`--weights RUN` instead of `--resume` starts a new run from its weights"


def expect_same(saved: str, ours: Recipe) -> None:
    """Refuse a checkpoint whose recipe has another value of a key that is marked with ``SAME_ON_RESUME``.

    So is one of another component where the run's has such keys. A component of ``LISTED_KINDS`` that only
    one of the two recipes has is not compared: its tensors are missing, or left over.

    Args:
        saved: the checkpoint's resolved recipe.
        ours: the run's.

    Raises:
        CheckpointError: naming the keys.
    """
    for chosen in ours.selections():
        fields = attrs.fields(type(chosen.config))
        free = {field.name for field in fields if not field.metadata.get(SAME_ON_RESUME)}
        name = f"{chosen.kind}.{chosen.use}" if chosen.kind in LISTED_KINDS else chosen.kind
        there, here = tables(saved, chosen.kind).get(name, {}), plain(chosen)
        if there and len(free) < len(fields) and (found := differences(name, there, here, free)):
            what = f"the checkpoint's tensors would compute something else: {'; '.join(found)}"
            raise CheckpointError(f"{what}. {BEGIN_ANEW}")


def other_tensors(saved: str, ours: str, adding: Collection[str]) -> str:
    """Return sentences on why a run has other tensors than a checkpoint: empty if their recipes do not tell.

    Args:
        saved: the checkpoint's resolved recipe.
        ours: the run's, of the same model.
        adding: the wrappers that add parameters: a checkpoint opens with any of the others, or without.
    """
    names = (*(f"parallel.{use}" for use in sorted(adding)), "precision", "optimizer")
    found = [text for name in names for text in _of_table(name, saved, ours)]
    more = f", and {len(found) - MOST} more" if len(found) > MOST else ""
    told = f". The checkpoint was saved with another recipe: {'; '.join(found[:MOST])}{more}. {BEGIN_ANEW}"
    return told if found else ""


def _of_table(name: str, saved: str, ours: str) -> Iterator[str]:
    there, here = (tables(recipe, name.partition(".")[0]).get(name, {}) for recipe in (saved, ours))
    if there and here:
        yield from differences(name, there, here, RATES)
        if there["use"] != here["use"]:  # one may open the other's: keys that both have may be the reason
            both = there.keys() & here.keys() - {"use"}
            kept, own = ({key: table[key] for key in both} for table in (there, here))
            yield from differences(name, kept, own, RATES)
    elif there or here:
        yield f"{name} is only {'there' if there else 'in this recipe'}"


def tables(recipe: str, section: str) -> dict[str, Mapping[str, Any]]:
    """Return the tables of a section by the names that errors have of them: ``optimizer``, ``parallel.lora``.

    None of a text that is no recipe, such as a script's.
    """
    with suppress(tomli.TOMLDecodeError, LookupError, TypeError):
        found: Any = tomli.loads(recipe)[section]
        listed = section in LISTED_KINDS
        return {f"{section}.{each['use']}": each for each in found} if listed else {section: found}
    return {}
