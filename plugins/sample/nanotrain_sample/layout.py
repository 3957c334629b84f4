"""The recipe that text is written or scored by: the run's model on another layout, nothing that trains."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import attrs
import tomli_w

from nanotrain_core.api import Recipe, RecipeError, Registry, Resolution, Selection, resolve_recipe
from nanotrain_core.api.ranks import Degrees
from nanotrain_sample.source import Source

Tables = dict[str, Any]

#: Data that stand for none: nothing of them is read.
NO_DATA: Tables = {"use": "synthetic", "vocab": 2, "branching": 1, "sequences": 1, "validation_sequences": 0}


def resolved(
    source: Source,
    degrees: Mapping[str, int],
    overrides: Sequence[str],
    registry: Registry,
    folder: str,
    *,
    ranks: int | None = None,
    scores: bool = False,
    **plugins: Any,
) -> tuple[str, Resolution]:
    """Write the recipe to ``folder``; return its path and what it says.

    Args:
        source: weights and the recipe they were trained by.
        degrees: how the model is spread over ranks; all others are 1.
        overrides: lines laid over the recipe, as from ``--set``.
        registry: finds the components.
        folder: where the file goes.
        ranks: world size; None: the fewest that have the degrees.
        scores: whether the run's validation split is kept.
        plugins: keyword arguments of :func:`~nanotrain_core.api.resolve_recipe`.

    Raises:
        RecipeError: the model cannot be spread like that.
    """
    tables = tables_for(source, degrees, registry)
    layout = Degrees(degrees, tables["topology"], registry)
    ranks = ranks or layout.fewest_ranks() or prod(degrees.values())
    layout.check(ranks)
    tables["topology"] = {**tables["topology"], **layout.keys}
    tables["run"]["ranks"] = ranks
    tables["batch"]["sequences"] = ranks * degrees.get("pp", 1)  # a schedule may want one for each stage
    if scores:
        tables["data"], tables["evaluation"] = source.tables["data"], source.tables["evaluation"]
        # Which sequences are evaluated depends on the size of the run's batches.
        sequences = tables["batch"]["sequences"] = source.tables["batch"]["sequences"]
        # Where ranks' shares differ by one, the last microbatch of one sequence would be empty on some.
        tables["batch"]["microbatch"] = 1 if sequences % ranks == 0 else 2
    path = Path(folder, "sample.toml")
    path.write_text(tomli_w.dumps(tables), encoding="utf-8")
    try:
        return str(path), resolve_recipe(path, overrides=overrides, ranks=ranks, **plugins)
    except RecipeError as error:
        written = re.compile(rf"^{re.escape(str(path))}(:\d+)?: ")  # a file that is gone when this is read
        raise RecipeError([written.sub("", line) for line in error.lines]) from None


def tables_for(source: Source, degrees: Mapping[str, int], registry: Registry) -> Tables:
    """Return the recipe without degrees: components of the run where these are needed, else plain ones."""
    saved = source.tables
    topology = saved.get("topology", {"use": "grid"})
    run = {key: saved["run"][key] for key in ("seed", "timeout") if key in saved.get("run", {})}
    most = saved["model"].get("max_length") or 128
    data = saved.get("data", NO_DATA) if source.tokenizer is None else NO_DATA
    return {
        "run": {"name": "sample", "steps": 1, "compile": False, **run},
        "batch": {"microbatch": 1, "length": saved.get("batch", {}).get("length", min(most, 128))},
        "evaluation": {"sequences": 0},
        "topology": topology if degrees and topology.get("use") != "grid" else {"use": "grid"},
        "kernels": {"use": "auto"},
        "model": saved["model"],
        "parallel": wrappers(saved.get("parallel", ()), degrees, registry, source.adding),
        "schedule": {"use": _first("schedule", "pp", registry) if degrees.get("pp", 1) > 1 else "accumulate"},
        "optimizer": {"use": "sgd"},
        "precision": saved["precision"],
        "checkpoint": {"use": "simple"},
        "monitor": [],
        "data": data,
    }


def wrappers(
    saved: Sequence[Tables], degrees: Mapping[str, int], registry: Registry, adding: Collection[int] = ()
) -> list[Tables]:
    """Return the wrappers that split the model along ``degrees``: the run's in their order, then others.

    Those of the run at the places ``adding`` are among them: the model has their parameters. The others come
    before the first of these, which adds parameters to split layers. Data parallelism needs no wrapper, since
    there are no gradients.
    """
    found: list[Tables] = []
    adds: list[bool] = []
    wanted = {dim for dim, degree in degrees.items() if degree > 1 and dim not in ("dp", "edp", "pp")}
    for place, table in enumerate(saved):
        offers = registry.offers("parallel", table["use"])
        handled = wanted.intersection(*(component.mesh_dims for _, component in offers)) if offers else ()
        if handled or place in adding:
            found.append(table)
            adds.append(place in adding)
            wanted = wanted.difference(handled)
    others: list[Tables] = []
    for dim in ("tp", *sorted(wanted - {"tp"})):  # dense layers are split before experts
        use = _first("parallel", dim, registry)
        if use and dim in wanted:
            others.append({"use": use})
            wanted -= registry.get("parallel", use).mesh_dims
    at = adds.index(True) if True in adds else len(found)
    return [*found[:at], *others, *found[at:]]


def _first(kind: str, dim: str, registry: Registry) -> str:
    """Return the first component that uses ranks along ``dim``; if none does, the recipe is refused."""
    fit = (name for name in registry.names(kind) if dim in registry.get(kind, name).mesh_dims)
    return next(fit, "accumulate" if kind == "schedule" else "")


def without_data(resolution: Resolution) -> Recipe:
    """Return the recipe with data that stand for none: to write text, the run's need not be opened."""
    registry, recipe = resolution.registry, resolution.recipe
    table = {key: value for key, value in NO_DATA.items() if key != "use"}
    config = registry.get("data", NO_DATA["use"]).config(**table)
    return attrs.evolve(recipe, data=Selection("data", NO_DATA["use"], config))
