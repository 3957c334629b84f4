"""Parameters that wrappers of a run added to its model, in what it has saved: merged, or written alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import tomli
import torch

from nanotrain_core.checkpoint.safetensors_files import Entry, write_tensors
from nanotrain_core.contracts import AddedWeights, WeightReader
from nanotrain_core.errors import CheckpointError, NanotrainError, did_you_mean
from nanotrain_core.hf.mapping import ParameterMapping
from nanotrain_core.hf.weights import in_dtype
from nanotrain_core.recipe.model_table import without_none
from nanotrain_core.recipe.structure import structure
from nanotrain_core.registry.registry import Registry
from nanotrain_core.run.files import write_text_atomically


@attrs.define(frozen=True, eq=False)
class Addition:
    """What one wrapper of a run added to the model."""

    use: str
    to: AddedWeights
    config: Any


def additions(recipe: str, registry: Registry, path: Path) -> list[Addition]:
    """Return what the wrappers of a saved recipe, in its order, know of the parameters that they add.

    Raises:
        NanotrainError: one of them is not installed, or not as it was.
    """
    found = []
    for table in tomli.loads(recipe).get("parallel", ()):
        rest = dict(without_none(table))
        component = registry.get("parallel", use := rest.pop("use"))
        added = component.load_optional("added")
        if added is not None:
            config, problems = structure(rest, component.config, "parallel")
            if problems:
                raise CheckpointError("\n".join(f"{path}: {p.key}: {p.message}" for p in problems))
            found.append(Addition(use, added, config))
    return found


def merged(reader: WeightReader, found: Sequence[Addition]) -> WeightReader:
    """Return the weights of the model alone: what was added last is merged first."""
    for each in reversed(found):
        reader = each.to.merge(each.config, reader)
    return reader


def form_of(form: str, found: Sequence[Addition], usual: Sequence[str], registry: Registry) -> Addition:
    """Return whose parameters are written in a form.

    Raises:
        NanotrainError: those of no wrapper.
    """
    for each in found:
        if each.to.form == form:
            return each
    known = [*usual, *(each.to.form for each in found if each.to.form)]
    why = did_you_mean(form, known)
    for use in registry.names("parallel"):
        added = registry.get("parallel", use).load_optional("added")
        if added and added.form == form:
            why = f" is of what '{use}' adds to a model, and no run with it has saved these weights"
    raise NanotrainError(f"--to {form}{why}: these weights can be written as {', '.join(known)}")


def write_alone(
    addition: Addition,
    reader: WeightReader,
    mappings: Iterable[ParameterMapping],
    folder: Path,
    dtype: torch.dtype | None,
) -> int:
    """Write the files of what a wrapper added to ``folder``; return how many numbers they hold.

    Raises:
        CheckpointError: a weight is not finite, or not in ``dtype``.
    """
    numbers = 0
    for name, content in addition.to.files(addition.config, reader, mappings).items():
        if isinstance(content, str):
            write_text_atomically(folder / name, content)
        else:
            entries = list(_entries(content, dtype))
            write_tensors(folder / name, entries)
            numbers += sum(tensor.numel() for tensor in content.values())
    return numbers


def _entries(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> Iterator[Entry]:
    for name, tensor in tensors.items():
        written = in_dtype(tensor, dtype or tensor.dtype, name)
        yield Entry(name, tuple(written.shape), written.dtype, lambda written=written: written)  # type: ignore[misc]
