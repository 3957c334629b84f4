"""Writes a model's weights to a folder, in our format or another library's, one tensor at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import attrs
import torch

from nanotrain_core.checkpoint.run_state import load_json, read_json
from nanotrain_core.checkpoint.safetensors_files import Entry, write_shards
from nanotrain_core.errors import CheckpointError, FolderError
from nanotrain_core.hf.added_weights import form_of, write_alone
from nanotrain_core.hf.mapping import HFError, HFMapping
from nanotrain_core.hf.open_weights import CONFIG, TABLE, Weights, hf_models, on_meta, open_weights
from nanotrain_core.hf.weights import Atlas, in_dtype, whole
from nanotrain_core.precision.dtypes import kept_dtypes
from nanotrain_core.recipe.write import write_model
from nanotrain_core.registry.registry import Registry
from nanotrain_core.run.files import flush, write_text_atomically
from nanotrain_core.run.progress_bar import show_progress

GENERATION = "generation_config.json"
#: Files that are copied unchanged along with weights.
TOKENIZER = (
    "tokenizer*",
    "chat_template.jinja",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "additional_chat_templates/*.jinja",
    GENERATION,
)

#: Advice for a model that transformers does not support.
OWN_NAMES = "Under its own names it can be written: --to nanotrain"

#: The names in which all weights of a model are written. A wrapper has a form of what it adds.
FORMS = ("huggingface", "nanotrain")

#: Writes into a folder; returns how many numbers and how many files of tensors.
Write = Callable[[Path], tuple[int, int]]

#: The dtype in which each of our parameters is written, by name.
Dtypes = Mapping[str, torch.dtype]


@attrs.define(frozen=True)
class Written:
    """The result of a conversion."""

    model: str
    form: str
    parameters: int
    files: int
    step: int | None
    """Of the checkpoint that was read, if it tells."""


def convert(
    source: Path,
    target: Path,
    registry: Registry,
    *,
    form: str | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5 * 10**9,
) -> Written:
    """Write the weights at ``source`` to the new folder ``target``, atomically.

    Args:
        source: anything that :func:`~nanotrain_core.hf.open_weights.open_weights` supports.
        target: a folder that does not exist, or is empty.
        registry: finds the model's component.
        form: one of :data:`FORMS`; None: the one that ``source`` does not have. Or that of a wrapper of the
            run that saved the weights, for what it has added to the model alone.
        dtype: of every weight; None keeps each one's own. State that a model keeps in its own dtype, such as
            a router's bias, is not converted. Weights beyond its range are refused.
        shard_bytes: maximum size of a file, unless a single tensor is larger.

    Raises:
        NanotrainError: ``source`` cannot be read, ``target`` not written, or the model has no mapping.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FolderError(f"{target} is there already: name a new folder")
    weights = open_weights(source, registry)
    with show_progress("verifying weights"):
        damage = weights.reader.damage()
    if damage:
        raise CheckpointError("; ".join(damage))
    form = form or ("nanotrain" if weights.hf else "huggingface")
    write = (
        _whole(weights, registry, form, dtype, shard_bytes)
        if form in FORMS
        else _added(weights, registry, form, dtype)
    )
    scratch = target.with_name(f".{target.name}.{uuid4().hex}.tmp")
    try:
        scratch.mkdir(parents=True)
        parameters, files = write(scratch)
        _copy_tokenizer(source, scratch)
        if weights.hf and not (scratch / GENERATION).exists():
            _write_special_tokens(source, scratch)
        flush(scratch)
        scratch.rename(target)
        flush(target.parent)
    except OSError as problem:
        raise FolderError(f"{target} cannot be written: {problem.strerror or problem}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Written(weights.selection.use, form, parameters, files, weights.step)


def _whole(
    weights: Weights, registry: Registry, form: str, dtype: torch.dtype | None, shard_bytes: int
) -> Write:
    """Return what writes all weights of the model."""
    dtypes = weights.reader.dtypes
    if dtype:
        kept = kept_dtypes(on_meta(weights.selection, registry))
        dtypes = {**dict.fromkeys(weights.reader.shapes, dtype), **kept}
    entries, name, text = (_theirs if form == "huggingface" else _ours)(weights, registry, dtypes)
    entries = [attrs.evolve(entry, read=partial(_finite, weights.path, entry)) for entry in entries]

    def write(folder: Path) -> tuple[int, int]:
        files = write_shards(folder, entries, shard_bytes)
        write_text_atomically(folder / name, text)
        return sum(entry.nbytes // entry.dtype.itemsize for entry in entries), files

    return write


def _added(weights: Weights, registry: Registry, form: str, dtype: torch.dtype | None) -> Write:
    """Return what writes the parameters that a wrapper has added to the model."""
    addition, reader = form_of(form, weights.added, FORMS, registry), weights.unmerged or weights.reader
    mappings = hf_mapping(weights, registry).mappings(weights.selection.config)
    return lambda folder: (write_alone(addition, reader, mappings, folder, dtype), 1)


def _finite(source: Path, entry: Entry) -> torch.Tensor:
    return in_dtype(entry.read(), entry.dtype, f"{source}: {entry.name}")


def _ours(weights: Weights, registry: Registry, dtypes: Dtypes) -> tuple[list[Entry], str, str]:
    """Return the tensors, and the name and text of the file that describes them."""
    return list(_entries(weights, dtypes)), TABLE, write_model(weights.selection)


def _entries(weights: Weights, dtypes: Dtypes) -> Iterator[Entry]:
    for name, shape in weights.reader.shapes.items():
        yield Entry(name, shape, dtypes[name], lambda n=name, s=shape: weights.reader.read(n, whole(s)))  # type: ignore[misc]


def _theirs(weights: Weights, registry: Registry, dtypes: Dtypes) -> tuple[list[Entry], str, str]:
    use, model_config = weights.selection.use, weights.selection.config
    hf = hf_mapping(weights, registry)
    try:
        config: dict[str, Any] = hf.config(model_config)
    except HFError as problem:
        why = f"model '{use}' cannot be written for transformers: {problem}"
        raise HFError(f"{why}. {OWN_NAMES}") from None
    atlas = Atlas(hf.mappings(model_config), weights.reader.shapes)
    entries = list(atlas.entries(weights.reader, dtypes))
    dtype = entries[0].dtype
    entries += [Entry(n, s, dtype, partial(torch.empty, s, dtype=dtype)) for n, s in hf.empty(model_config)]
    largest = max(entries, key=lambda entry: entry.nbytes).dtype
    config["torch_dtype"] = str(largest).removeprefix("torch.")
    return entries, CONFIG, json.dumps(config, indent=2) + "\n"


def hf_mapping(weights: Weights, registry: Registry) -> HFMapping:
    """Return the model's names in transformers.

    Raises:
        HFError: it has none.
    """
    use = weights.selection.use
    hf: HFMapping | None = registry.get("model", use).load_optional("hf")
    if hf is None:
        known = ", ".join(sorted({name for name, _ in hf_models(registry).values()}))
        why = f"model '{use}' has no mapping in transformers; models that have: {known}"
        raise HFError(f"{why}. {OWN_NAMES}")
    return hf


def _copy_tokenizer(source: Path, target: Path) -> None:
    for pattern in TOKENIZER if source.is_dir() else ():
        for path in source.glob(pattern):
            if path.is_file():
                copy = target / path.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                flush(shutil.copyfile(path, copy))
                flush(copy.parent)


def _write_special_tokens(source: Path, target: Path) -> None:
    """Keep the tokens of config.json, which is not copied: transformers generates with them by default."""
    config = load_json(read_json(source / CONFIG))
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    tokens = {key: config[key] for key in keys if config.get(key) is not None}
    if tokens:
        write_text_atomically(target / GENERATION, json.dumps(tokens, indent=2) + "\n")
