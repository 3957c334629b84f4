"""Detects the format of weights at a path and opens them, checked against the model they claim to be.

Supported are a folder that ``nanotrain convert`` wrote, a Hugging Face folder, and whatever a checkpoint
component can open for its weights: a checkpoint, or a run folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import tomli
import torch
from torch import nn

from nanotrain_core.checkpoint.info import strip_ema
from nanotrain_core.checkpoint.listing import newest_path
from nanotrain_core.checkpoint.run_state import load_json, read_json
from nanotrain_core.checkpoint.safetensors_files import DTYPES, Shards, Tensors
from nanotrain_core.checkpoint.tensor_boxes import Shape
from nanotrain_core.contracts import Model, SavedWeights, WeightReader
from nanotrain_core.errors import CheckpointError, as_plugin_error, describe, did_you_mean, expect_result
from nanotrain_core.hf.added_weights import Addition, additions, merged
from nanotrain_core.hf.block_scaled import BlockScaled
from nanotrain_core.hf.mapping import HFError, HFMapping, ParameterMapping, expect
from nanotrain_core.hf.weights import Atlas, HFWeights, differences, missing_prefix
from nanotrain_core.layout.meta_device import meta_device
from nanotrain_core.pipeline.actions import Part
from nanotrain_core.recipe.model_table import without_none
from nanotrain_core.recipe.structure import structure
from nanotrain_core.recipe.tree import Selection
from nanotrain_core.registry.contract_checks import expect_members
from nanotrain_core.registry.registry import Registry
from nanotrain_core.registry.signatures import expect_signatures
from nanotrain_core.run.suggest_run import did_you_mean_weights

#: The ``[model]`` table of a folder in our format: a recipe can extend it.
TABLE = "model.toml"
CONFIG = "config.json"
#: Of the adapters that ``peft`` saves, which are no model.
ADAPTERS = "adapter_config.json"
#: The name of a head in the files of transformers' classes of language models.
HEAD = "lm_head.weight"
#: Maximum ratio of the size a config describes to the files' size at which missing tensors are listed.
MAX_SIZE_RATIO = 4
NOTHING: Mapping[str, Shape] = MappingProxyType({})


@attrs.define(frozen=True, eq=False)
class Weights:
    """A model's weights on disk: every parameter is present, in its shape."""

    path: Path
    selection: Selection
    reader: WeightReader
    hf: bool
    """Whether the weights are stored in another library's format."""
    step: int | None = None
    """Of the checkpoint, if they are of one that tells."""
    added: Sequence[Addition] = ()
    """What wrappers of the run added to the model, if it was merged into :attr:`reader`."""
    unmerged: WeightReader | None = None
    """The weights as they are saved, in that case."""


def open_weights(
    path: Path, registry: Registry, added: Mapping[str, Shape] = NOTHING, wrappers: Sequence[Any] = ()
) -> Weights:
    """Open the weights at ``path``, and compare names and shapes with the model of its table.

    Args:
        path: of a file or folder; of a checkpoint or a run with ``@ema`` behind it: the averaged weights.
        registry: the plugins.
        added: shapes of parameters that a run has beside the model's: the weights may have them too.
        wrappers: configs of the run's wrappers. What a wrapper with another config, or none of them, had
            added to the weights is merged: beside this run's model it would compute something else.

    Raises:
        CheckpointError: there are no weights, or they do not match the model.
        HFError: no component can represent the other library's model.
    """
    path, averaged = strip_ema(path)
    if (path / ADAPTERS).is_file() and not any(path.glob("model*.safetensors")):
        raise CheckpointError(
            f"{path} holds PEFT adapters ({ADAPTERS}) without their model: save the merged model with peft's "
            "merge_and_unload() and save_pretrained(), or name the run that trained them"
        )
    if (path / CONFIG).is_file() and not (path / TABLE).is_file() and not averaged:
        return _open_hf(path, registry)
    ours = (path / TABLE).is_file() and not averaged
    saved = _open_ours(path) if ours else _open_checkpoint(path, registry)
    if averaged:
        saved = attrs.evolve(saved, reader=Averaged(path, saved))
    selection = select(saved.model, registry, path)
    shapes, reader, beside = shapes_of(selection, registry), saved.reader, []
    if saved.recipe and reader.shapes.keys() - shapes.keys():
        theirs = additions(saved.recipe, registry, path)
        beside = theirs if any(each.config not in wrappers for each in theirs) else []
        reader = merged(reader, beside)
    found = reader.shapes
    also = {name: shape for name, shape in added.items() if name in found}
    problems = list(differences(found, {**also, **shapes}))
    if problems and found.keys() > shapes.keys():
        problems[0] += (
            "; one that a wrapper of its run added is read by `nanotrain eval` and `sample`, and by "
            "`nanotrain run` under that wrapper; merge it into the model's own for use without the wrapper"
        )
    refuse(path, problems)
    unmerged = saved.reader if beside else None
    return Weights(path, selection, reader, False, saved.step, beside, unmerged)


class Averaged:
    """Moving averages of weights where there are any, and the weights that are not trained.

    See :class:`~nanotrain_core.contracts.WeightReader`.
    """

    def __init__(self, path: Path, saved: SavedWeights) -> None:
        if saved.averages is None or not saved.averages.shapes:
            raise CheckpointError(f"{path} has no averaged weights: expected a run with optimizer.ema_decay")
        self.weights, self.averages = saved.reader, saved.averages
        self.shapes: Mapping[str, Shape] = saved.reader.shapes
        self.dtypes: Mapping[str, torch.dtype] = {**saved.reader.dtypes, **saved.averages.dtypes}
        self.damage = saved.reader.damage

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Return one block."""
        return (self.averages if name in self.averages.shapes else self.weights).read(name, index)


def refuse(path: Path, problems: Sequence[str]) -> None:
    """Raise the first of ``problems``, with their count."""
    if problems:
        count = f" ({len(problems)} problems in all)" if len(problems) > 1 else ""
        raise CheckpointError(f"the weights in {path} do not fit the model: {problems[0]}{count}")


# --- ours -------------------------------------------------------------------------------------


class OwnShards:
    """A folder under our own names. See :class:`~nanotrain_core.contracts.WeightReader`."""

    def __init__(self, folder: Path) -> None:
        self.shards = Shards(folder)
        self.shapes: Mapping[str, Shape] = self.shards.shapes
        self.dtypes = known_dtypes(folder, self.shards)
        self.read = self.shards.read

    def damage(self) -> Sequence[str]:
        """Return nothing: the files carry no checksum."""
        return ()


def _open_ours(folder: Path) -> SavedWeights:
    try:
        table = tomli.loads((folder / TABLE).read_text(encoding="utf-8"))["model"]
    except (tomli.TOMLDecodeError, KeyError) as problem:
        raise CheckpointError(f"{folder / TABLE}: expected a table [model]: {problem!r}") from None
    return SavedWeights(table, OwnShards(folder))


def _open_checkpoint(path: Path, registry: Registry) -> SavedWeights:
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or folder{did_you_mean_weights(path)}")
    found = list(_opened(path, registry))
    if len(found) > 1:  # listed in this case alone: a listing looks at every file of every checkpoint
        found = list(_opened(newest_path(path, registry), registry))
    if found:
        return found[0]
    raise CheckpointError(
        f"{path} holds no weights that can be read: expected a folder with {CONFIG} (Hugging Face) or "
        f"{TABLE} (`nanotrain convert`), a checkpoint, or the folder of a run that saved one"
    )


def _opened(path: Path, registry: Registry) -> Iterator[SavedWeights]:
    """Yield what each checkpoint component opens at ``path``: of a run folder the newest of its own."""
    for use in registry.names("checkpoint"):
        opener = registry.get("checkpoint", use).load_optional("weights")
        if opener is None:
            continue
        label = f"checkpoint '{use}' of {registry.owner('checkpoint', use)}"
        with as_plugin_error(f"{label}: its weights"):
            saved = opener(path)
        if saved is not None:
            expect_result(label, "weights", saved, SavedWeights)
            for reader in (saved.reader, saved.averages or saved.reader):
                expect_members(label, WeightReader, reader, what="the reader of its weights is")
                expect_signatures(label, "checkpoint", WeightReader, reader)
            yield saved


def known_dtypes(path: Path, shards: Tensors) -> dict[str, torch.dtype]:
    """Return the dtypes of all tensors.

    Raises:
        CheckpointError: one is not a floating-point format of 16 bits or more.
    """
    for name, code in shards.dtypes.items():
        if code not in DTYPES:
            known = ", ".join(DTYPES)
            raise CheckpointError(f"{path}: {name} is stored as {code}; only {known} can be read")
    return {name: DTYPES[code] for name, code in shards.dtypes.items()}


def select(table: Mapping[str, Any], registry: Registry, path: Path, kind: str = "model") -> Selection:
    """Resolve the types of a ``[model]`` table, or of another kind's.

    Raises:
        CheckpointError: it does not fit the component as installed.
    """
    rest: dict[str, Any] = without_none(table)
    use = rest.pop("use", None)
    if not isinstance(use, str):
        raise CheckpointError(f"{path}: the {kind}'s table does not say which {kind} to use")
    config, problems = structure(rest, registry.get(kind, use).config, kind)
    if problems:
        raise CheckpointError("\n".join(f"{path}: {problem.key}: {problem.message}" for problem in problems))
    return Selection(kind, use, config)


def on_meta(selection: Selection, registry: Registry) -> nn.Module:
    """Return a whole model without storage, as its component builds it."""
    model: Model = registry.build(selection)
    with meta_device():
        return model.build(Part.whole(model.layers))


def shapes_of(selection: Selection, registry: Registry) -> dict[str, Shape]:
    """Return the global shape of every parameter of a model."""
    return {name: tuple(p.shape) for name, p in on_meta(selection, registry).named_parameters()}


# --- another library's ------------------------------------------------------------------------


def hf_models(registry: Registry) -> dict[str, tuple[str, HFMapping]]:
    """Return ``model_type`` of a ``config.json`` -> (name of the component, its mapping)."""
    found: dict[str, tuple[str, HFMapping]] = {}
    for use in registry.names("model"):
        hf: HFMapping | None = registry.get("model", use).load_optional("hf")
        for model_type in hf.model_types if hf else ():
            found[model_type] = (use, hf)  # type: ignore[assignment]
    return found


def _open_hf(folder: Path, registry: Registry) -> Weights:
    try:
        config = load_json(read_json(folder / CONFIG))
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"{folder / CONFIG} is damaged: {problem}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / CONFIG} is damaged: expected a table")
    known, wanted = hf_models(registry), config.get("model_type")
    if not isinstance(wanted, str) or wanted not in known:
        near = did_you_mean(str(wanted), list(known))
        raise HFError(
            f"{folder / CONFIG}: model_type is {wanted!r}{near}; installed models can represent: "
            f"{', '.join(sorted(known))}"
        )
    use, hf = known[wanted]
    try:
        expect(config, "is_causal", True)  # read by the masks of every class of transformers
        shards = _shards(folder, config.get("quantization_config"))
        table = {"use": use, **hf.table(config, shards.shapes.keys())}
    except HFError as problem:
        raise HFError(f"{folder}: model '{use}' cannot represent it: {problem}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as problem:
        text = f"a value of {CONFIG} is of a kind that it does not expect: {describe(problem)}"
        raise HFError(f"{folder}: model '{use}' cannot represent it: {text}") from None
    selection = select(table, registry, folder)
    _expect_about_as_many(folder, hf.mappings_in(selection.config, config), shards)
    shapes = shapes_of(selection, registry)
    numbers, held = (sum(map(prod, each.values())) for each in (shapes, shards.shapes))
    if numbers > MAX_SIZE_RATIO * held:
        refuse(folder, [f"{CONFIG} describes {numbers:,} numbers, and the files hold {held:,}"])
    atlas = Atlas(hf.mappings_in(selection.config, config), shapes)
    return Weights(folder, selection, _read_hf(folder, shards, atlas, hf.ignored), hf=True)


def _expect_about_as_many(folder: Path, mappings: Iterable[ParameterMapping], shards: Tensors) -> None:
    """Reject a config with far more tensors than the files, before a model of ten thousand layers is built.

    Raises:
        CheckpointError: it has far more.
    """
    most, named = MAX_SIZE_RATIO * len(shards.shapes), 0
    for mapping in mappings:
        named += len(mapping.hf) if isinstance(mapping.hf, tuple) else 1
        if named > most:
            text = f"{CONFIG} describes more than {most} tensors, and the files hold {len(shards.shapes)}"
            refuse(folder, [text])


def _shards(folder: Path, quantization: Mapping[str, Any] | None) -> Tensors:
    shards = Shards(folder)
    return BlockScaled(folder, shards, quantization) if quantization else shards


def _read_hf(folder: Path, shards: Tensors, atlas: Atlas, ignored: Sequence[str]) -> HFWeights:
    prefix, theirs = missing_prefix(shards.shapes, atlas.theirs), atlas.theirs
    # A head has no prefix of its own.
    names = {name: name if name in theirs or name == HEAD else prefix + name for name in shards.shapes}
    found = {names[name]: shape for name, shape in shards.shapes.items()}
    if HEAD in found and HEAD not in theirs:  # the model's is tied
        shape = found.pop(HEAD)
        alike = [stored for stored, name in names.items() if name in theirs and theirs[name] == shape]
        if not _is_copy(shards, HEAD, alike):
            problem = f"it has a tensor {HEAD}, and {CONFIG} ties the head to the embedding, which is another"
            refuse(folder, [f"{problem}: expected tie_word_embeddings = false, or equal tensors"])
    refuse(folder, list(differences(found, theirs, ignored)))
    dtypes = known_dtypes(folder, shards)
    return HFWeights(shards, atlas, {names[name]: dtype for name, dtype in dtypes.items()}, prefix)


def _is_copy(shards: Tensors, name: str, of: Iterable[str]) -> bool:
    """Return whether a tensor equals one of others of its shape."""
    index = tuple(slice(0, size) for size in shards.shapes[name])
    tensor = shards.read(name, index)
    return any(torch.equal(shards.read(other, index), tensor) for other in of)
