"""Loads saved weights into a run that starts from them: each rank reads its own blocks (``run.weights``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import nn

from nanotrain_core.checkpoint.tensor_boxes import Shape
from nanotrain_core.contracts import WeightReader
from nanotrain_core.errors import CheckpointError
from nanotrain_core.hf.open_weights import Weights, open_weights, shapes_of
from nanotrain_core.hf.weights import not_finite
from nanotrain_core.layout.initialization import ReadBlock
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import PlacedParameter
from nanotrain_core.recipe.model_table import model_table, refuse_other_model
from nanotrain_core.recipe.tree import Selection
from nanotrain_core.registry.registry import Registry
from nanotrain_core.run.progress_bar import show_progress


def fingerprint(reader: WeightReader) -> str:
    """Return a SHA-256 over all names and shapes, and over a corner of up to 64 tensors, evenly selected.

    It distinguishes weights of one model: those on a host's own disk, or of another step of a run that is
    still saving. Weights that differ in only a few values may go unnoticed.
    """
    names = sorted(reader.shapes)
    digest = sha256(repr([(name, tuple(reader.shapes[name])) for name in names]).encode())
    for name in names[:: -(-len(names) // 64)]:
        corner = reader.read(name, tuple(slice(0, min(16, size)) for size in reader.shapes[name]))
        digest.update(corner.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def saved_weights(
    path: Path | str | None,
    registry: Registry,
    selection: Selection,
    wrappers: Sequence[Any],
    placed: Sequence[PlacedParameter],
    mesh: Mesh,
) -> Iterator[ReadBlock]:
    """Open weights, whose blocks are read one at a time, reading little more. Rank 0 checks for damage.

    Collective when it is entered, and when it is left, after all blocks have been read. Parameters that a
    wrapper has added to the model may be missing from the weights.

    Args:
        path: of the weights, as for :func:`~nanotrain_core.hf.open_weights.open_weights`. None: nothing is
            saved.
        registry: the plugins.
        selection: the run's model.
        wrappers: configs of the run's wrappers.
        placed: this rank's parameters, on any device.
        mesh: of the run.

    Raises:
        CheckpointError: the weights are damaged, of another model than the run's, beyond the range of its
            dtypes, or differ on some rank.
    """
    if not path:
        yield lambda name, parameter: None
        return
    path = Path(path)
    added_shapes = _shapes_of_added(selection, registry, placed, mesh)
    weights = open_weights_of(selection, path, registry, added_shapes, wrappers)
    if weights.added and mesh.rank == 0:
        structlog.get_logger("nanotrain.weights").warning(
            "what a wrapper of the saved run had added is merged into the model's weights, and rounded as "
            "this run holds them: none of this run's wrappers has the same keys",
            merged=[each.use for each in weights.added],
            weights=str(path),
        )
    with show_progress("verifying weights"):
        damage = mesh.gather(tuple(weights.reader.damage()) if mesh.rank == 0 else ())[0]
    if damage:
        raise CheckpointError("; ".join(damage))
    prints = mesh.gather(fingerprint(weights.reader))
    other = next((rank for rank, found in enumerate(prints) if found != prints[0]), None)
    if other is not None:
        raise CheckpointError(f"rank {other} finds other weights in {path} than rank 0")
    added = _missing_from(path, weights.reader, added_shapes, placed, mesh)
    slices = {each.placement.name: each.placement.slices for each in placed}
    not_finite_values: list[str] = []
    total = sum(each.parameter.nbytes for each in placed if each.placement.name not in added)
    with show_progress("loading weights", total, "B") as advance:

        def read(name: str, parameter: nn.Parameter) -> torch.Tensor | None:
            if name in added:
                return None
            block = weights.reader.read(name, slices[name])
            # Checked in host memory, before it is on the device.
            rounded = block.to(parameter.dtype)
            if parameter.requires_grad and (problem := not_finite(block, rounded)):
                not_finite_values.append(f"{name} {problem}")
            advance(rounded.nbytes)
            return rounded

        yield read
    if first := next((names[0] for names in mesh.gather(not_finite_values) if names), ""):
        raise CheckpointError(f"{path}: {first}")


def open_weights_of(
    selection: Selection,
    path: Path,
    registry: Registry,
    added: Mapping[str, Shape],
    wrappers: Sequence[Any],
) -> Weights:
    """Open weights to start a run of a model from: see :func:`~nanotrain_core.hf.open_weights.open_weights`.

    Raises:
        CheckpointError: there are none, or they are of another model.
    """
    weights = open_weights(path, registry, added, wrappers)
    refuse_other_model(model_table(weights.selection), selection, what=f"{path} has weights")
    return weights


def _shapes_of_added(
    selection: Selection, registry: Registry, placed: Sequence[PlacedParameter], mesh: Mesh
) -> dict[str, Shape]:
    """Return shapes of the run's parameters that its model does not have, such as a wrapper's adapters."""
    shapes = shapes_of(selection, registry)
    own = {p.placement.name: p.placement.global_shape for p in placed if p.placement.name not in shapes}
    return {name: shape for theirs in mesh.gather(own) for name, shape in theirs.items()}


def _missing_from(
    path: Path,
    reader: WeightReader,
    added_shapes: Mapping[str, Shape],
    placed: Sequence[PlacedParameter],
    mesh: Mesh,
) -> set[str]:
    """Return which parameters that wrappers added to the run's model are not in the weights.

    Raises:
        CheckpointError: one of the model's is on no rank, so that a wrapper has renamed it.
    """
    if not (added := added_shapes.keys() - reader.shapes.keys()):
        return set()
    names = set().union(*mesh.gather({each.placement.name for each in placed}))
    if lost := reader.shapes.keys() - names:
        raise CheckpointError(
            f"{path} has {min(lost)}, and the run has {min(added)} instead: expected wrappers to keep the "
            "names of the model's parameters, and to add others beside them"
        )
    if mesh.rank == 0:
        structlog.get_logger("nanotrain.weights").warning(
            "parameters that a wrapper added are not in the weights and keep their initial values",
            parameters=len(added),
            such_as=min(added),
            weights=str(path),
        )
    return added
