"""Parameters that wrappers of a run add to its model, such as adapters of LoRA. Torch-free when imported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tomli

from nanotrain_core.checkpoint.info import CheckpointInfo
from nanotrain_core.checkpoint.tensor_boxes import Shape
from nanotrain_core.errors import NanotrainError, as_plugin_error
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.recipe.model_table import model_table, refuse_other_model
from nanotrain_core.recipe.tree import Selection
from nanotrain_core.registry.registry import Registry

if TYPE_CHECKING:
    from torch import nn

    from nanotrain_core.layout.placement import Placements


def model_problems(saved: CheckpointInfo, registry: Registry) -> list[str]:
    """Return why a checkpoint's weights are not those of its model, or its model not that of its recipe.

    Nothing for a script's checkpoint, which has neither. A model that is not installed is a problem, as is a
    wrapper of a run with parameters that the model lacks.
    """
    from nanotrain_core.hf.open_weights import select, shapes_of
    from nanotrain_core.hf.weights import differences

    meta = saved.describe()["meta"]
    if not meta.get("model"):
        return []
    try:
        model = select(meta["model"], registry, saved.path)
        recipe = tomli.loads(meta["recipe"])
        ours = select(recipe["model"], registry, saved.path)
        changing = {key for phase in recipe.get("phase", ()) for key in phase.get("model", ())}
        what = f"{saved.path}: unlike its recipe, its state is"
        refuse_other_model(model_table(model), ours, what=what, changing=changing)
        weights, expected = _weights(saved), shapes_of(model, registry)
        if weights.keys() - expected.keys():
            expected |= {name: shape for _, added in _added(saved, registry) for name, shape in added.items()}
        return [f"{saved.path}: {problem}" for problem in differences(weights, expected)]
    except (NanotrainError, tomli.TOMLDecodeError, LookupError) as problem:
        return [str(problem)]


def adding_wrappers(saved: CheckpointInfo, registry: Registry) -> tuple[int, ...]:
    """Return which wrappers of a checkpoint's recipe, by their places in it, add parameters to its model.

    Raises:
        NanotrainError: a wrapper is not installed, and the checkpoint has parameters that the model lacks.
    """
    from nanotrain_core.hf.open_weights import select, shapes_of

    model = select(saved.describe()["meta"]["model"], registry, saved.path)
    if not _weights(saved).keys() - shapes_of(model, registry).keys():
        return ()
    return tuple(number for number, added in _added(saved, registry) if added)


def _weights(saved: CheckpointInfo) -> dict[str, Shape]:
    tensors = saved.describe()["tensors"]
    return {name: tuple(tensor["shape"]) for name, tensor in tensors.items() if "/" not in name}


def _added(saved: CheckpointInfo, registry: Registry) -> Iterator[tuple[int, Mapping[str, Shape]]]:
    """Yield the place of each wrapper in the recipe, and the shapes of the parameters that it adds."""
    from nanotrain_core.hf.open_weights import select

    meta = saved.describe()["meta"]
    tables: Sequence[Mapping[str, Any]] = tomli.loads(meta["recipe"]).get("parallel", ())
    wrappers = [select(table, registry, saved.path, kind="parallel") for table in tables]
    yield from enumerate(shapes_added_by(select(meta["model"], registry, saved.path), wrappers, registry))


def shapes_added_by(
    selection: Selection, wrappers: Iterable[Selection], registry: Registry
) -> Iterator[Mapping[str, Shape]]:
    """Yield, for each wrapper, the shapes of the parameters that it adds to a model.

    They are applied on one rank: what they split over several is whole there.
    """
    steps = _wrapped_on_one_rank(selection, wrappers, registry)
    known = {*next(steps)[1]}
    for part, placements in steps:
        parameters = {name for name, _ in part.named_parameters()} - known
        known = {*placements}
        yield {name: placements[name].global_shape for name in parameters}


def model_with(selection: Selection, wrappers: Iterable[Selection], registry: Registry) -> nn.Module:
    """Return a whole model without storage, with the parameters that wrappers add to it, on one rank."""
    *_, (part, _) = _wrapped_on_one_rank(selection, wrappers, registry)
    return part


def _wrapped_on_one_rank(
    selection: Selection, wrappers: Iterable[Selection], registry: Registry
) -> Iterator[tuple[nn.Module, Placements]]:
    """Yield a model on ``meta`` as it is built, and after each wrapper."""
    from nanotrain_core.hf.open_weights import on_meta
    from nanotrain_core.layout.mesh import Mesh
    from nanotrain_core.layout.placement import place
    from nanotrain_core.run.wrapping import wrap

    mesh = Mesh(Layout({"dense": View(("dp",), (1,))}))
    stages = {0: on_meta(selection, registry)}
    placements = place(stages.values(), mesh.layout)
    yield stages[0], placements
    for each in wrappers:
        wrapper = registry.build(each)
        what = f"parallel '{each.use}' cannot be applied on one rank, to find what it adds: its apply"
        with as_plugin_error(what):  # such as one that needs a process group, which only a run has
            stages, _ = wrap(stages, placements, mesh, [(each, wrapper)])
        yield stages[0], placements
