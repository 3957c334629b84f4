"""What is at a path: weights, the recipe that they were trained by, and a tokenizer."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import tomli

from nanotrain_core.api import (
    CheckpointError,
    DataError,
    NanotrainError,
    Recipe,
    Registry,
    Resolution,
    find_checkpoint,
)
from nanotrain_core.api.ranks import adding_wrappers, strip_ema
from nanotrain_core.api.text import HasConversations, HasPrefix, HasTokenizer, TextCodec, make_tokenizer
from nanotrain_core.api.torch import open_weights

#: Files that tell a folder of weights alone: ours, and Hugging Face's.
WEIGHTS_ALONE = ("model.toml", "config.json")

#: ``precision`` of weights that no recipe comes with, by the dtype that they are stored in.
PRECISIONS = {"torch.float64": "fp64", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


@attrs.define(frozen=True)
class Source:
    """Weights, and what is known of them."""

    path: Path
    """One checkpoint, or a folder of weights alone; with ``@ema`` behind it for averaged weights."""
    tables: Mapping[str, Any]
    """Of the run's resolved recipe; of weights alone ``model`` and ``precision``."""
    tokenizer: str | None
    """As ``data.tokenizer`` of ``text`` has it; None: the recipe's data component has one."""
    fingerprint: str | None = None
    """Of the data that the run trained on."""
    lengths: tuple[int, ...] = ()
    """Of the sequences of all its phases, which ``tables`` do not have."""
    ends: frozenset[int] = frozenset()
    """Tokens that end a text, as a Hugging Face folder says, beside the tokenizer's end-of-text token."""
    bos: str | None = None
    """What a Hugging Face folder calls its tokenizer's BOS, whether or not it stands before texts."""
    adding: tuple[int, ...] = ()
    """Which of the recipe's wrappers add parameters to the model, by their places in it."""

    @property
    def length(self) -> int | None:
        """Tokens of the sequences that the run trained on; None: not known."""
        return self.tables["batch"]["length"] if "batch" in self.tables else None


def find(path: Path, step: int | None, tokenizer: str | None, registry: Registry) -> Source:
    """Return what is at ``path``: of a run folder its newest checkpoint, or that of ``step``.

    Raises:
        NanotrainError: nothing that text can be written with, or no tokenizer is known.
    """
    path, averaged = strip_ema(path)
    if any((path / name).is_file() for name in WEIGHTS_ALONE) and not averaged:
        return _weights_alone(path, step, tokenizer, registry)
    _, saved = find_checkpoint(path, registry, step)
    meta = saved.describe()["meta"]
    if not meta.get("model"):
        raise CheckpointError(
            f"{saved.path} was saved by a script with a model of its own, which no recipe describes: "
            "build the model there and call it"
        )
    tables = tomli.loads(meta["recipe"])
    return Source(
        saved.path.with_name(saved.path.name + "@ema") if averaged else saved.path,
        _of_phase(tables, meta, registry),
        tokenizer,
        fingerprint=meta.get("data", {}).get("fingerprint"),
        lengths=_lengths(tables),
        adding=adding_wrappers(saved, registry),
    )


def _of_phase(tables: dict[str, Any], meta: Mapping[str, Any], registry: Registry) -> dict[str, Any]:
    """Return a recipe without phases, with the model of the one it was saved in and what that validates on.

    Data that is split by pieces of the longest sequence of any phase keeps them: with shorter pieces another
    part would be held out, which the run may have trained on.
    """
    if "phase" not in tables:
        return tables
    data, rest = tables["data"], {**tables}
    phases = rest.pop("phase")
    batch = _validated(tables["batch"], phases, meta["data"].get("tokens_before", 0))
    offers = registry.offers("data", data["use"])  # sampling needs it only for the tokenizer
    if offers and "piece_length" in attrs.fields_dict(offers[0][1].config):
        longest = max(data.get("piece_length", 0), *_lengths(tables))
        rest["data"] = {**data, "piece_length": longest}
    return {**rest, "model": _plain(meta["model"]), "batch": batch}


def _lengths(tables: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the lengths of a recipe's sequences, in all its phases."""
    changed = (phase.get("batch", {}) for phase in tables.get("phase", ()))
    found = (batch["length"] for batch in (tables["batch"], *changed) if "length" in batch)
    return tuple(dict.fromkeys(found))


def _validated(batch: Mapping[str, Any], phases: Sequence[Mapping[str, Any]], tokens: int) -> dict[str, Any]:
    """Return ``[batch]`` as the run validated in the step after ``tokens``.

    As :meth:`~nanotrain_core.api.PhaseTimeline.validated_at`, which needs a typed recipe and with it all
    plugins of the run.
    """
    validated, now, begins = {**batch}, {**batch}, 0
    for phase in phases:
        if tokens < begins:
            break
        changes = phase.get("batch", {})
        ramps = {key: value for key, value in changes.items() if isinstance(value, Mapping)}
        now |= changes | {key: ramp.get("start", now[key]) for key, ramp in ramps.items()}
        if now["length"] != validated["length"]:
            validated = {**now}
        now |= {key: ramp["end"] for key, ramp in ramps.items()}
        begins = phase.get("until_tokens", math.inf)
    return validated


def _weights_alone(folder: Path, step: int | None, tokenizer: str | None, registry: Registry) -> Source:
    if step is not None:
        raise CheckpointError(
            f"--step {step}: {folder} holds weights alone, of no step; expected a run folder"
        )
    if tokenizer is None:
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise NanotrainError(
                f"{folder} has no tokenizer.json, and no recipe that names data: give --tokenizer FILE, or "
                "--tokenizer bytes"
            )
        tokenizer = str(file)
    weights = open_weights(folder, registry)
    stored = {str(dtype) for dtype in weights.reader.dtypes.values()}
    precision = PRECISIONS.get(next(iter(stored)), "fp32") if len(stored) == 1 else "fp32"
    model = {"use": weights.selection.use, **_plain(attrs.asdict(weights.selection.config))}
    return Source(
        folder,
        {"model": model, "precision": {"use": precision}},
        tokenizer,
        ends=_ends(folder),
        bos=_bos(folder),
    )


def _ends(folder: Path) -> frozenset[int]:
    """Return ``eos_token_id`` of a Hugging Face folder; config.json counts if the other file is missing."""
    names = ("generation_config.json", "config.json")
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        return frozenset()
    try:
        found = json.loads(file.read_bytes()).get("eos_token_id")
    except (AttributeError, ValueError):
        raise CheckpointError(f"{file} is damaged: expected a JSON object") from None
    ends = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(end) is int for end in ends):
        raise CheckpointError(
            f"{file}: eos_token_id is {found!r}; expected a token's number, or a list of them"
        )
    return frozenset(ends)


def _bos(folder: Path) -> str | None:
    """Return ``bos_token`` of a Hugging Face folder's tokenizer."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            found = json.loads((folder / name).read_bytes())["bos_token"]
        except (OSError, ValueError, LookupError, TypeError):
            continue
        found = found.get("content") if isinstance(found, dict) else found
        if isinstance(found, str):
            return found
    return None


def ends_of(codec: TextCodec, others: Iterable[int | None]) -> frozenset[int]:
    """Return the tokens that end a text: the tokenizer's, and others that are known."""
    return frozenset(end for end in (codec.separator, *others) if end is not None)


def note_length(what: str, length: int, trained: int | None, limit: int | None) -> None:
    """Say that a ``length`` exceeds what the model was trained on, unless its positions end, at ``limit``."""
    if trained is not None and limit is None and length > trained:
        told = f"the run trained on sequences of {trained} tokens, and {what} {length}"
        print(f"nanotrain: note: {told}: what comes later is extrapolated", file=sys.stderr)


def _plain(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table without what is not set, which TOML has no word for."""
    kept = {key: value for key, value in table.items() if value is not None}
    return {key: _plain(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


@attrs.define(frozen=True)
class OfData:
    """An open data component as a :class:`~nanotrain_core.contracts.TextCodec`."""

    vocab_size: int
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    separator: int | None = None


def codec_of(recipe: Recipe, tokenizer: str | None, registry: Registry) -> TextCodec:
    """Return who turns text into tokens and back: ``tokenizer``, or what the recipe's data component offers.

    Raises:
        DataError: it is missing.
    """
    if tokenizer is not None:
        return make_tokenizer(tokenizer)
    data: Any = registry.build(recipe.data)
    if isinstance(data, HasTokenizer):
        return data.tokenizer_alone()
    data.open(length=recipe.batch.length, seed=recipe.run.seed)
    return OfData(data.vocab_size, data.encode, data.decode)


def fitting_codec(found: Resolution, tokenizer: str | None) -> TextCodec:
    """Return :func:`codec_of` for a model whose tokens it has.

    Raises:
        DataError: it is missing.
        NanotrainError: the tokenizer has tokens that the model has not.
    """
    codec = codec_of(found.recipe, tokenizer, found.registry)
    size = found.registry.build(found.recipe.model).vocab_size
    if codec.vocab_size > size:
        raise NanotrainError(
            f"the tokenizer has {codec.vocab_size} tokens, but the model's vocabulary is {size}: "
            "it was trained with another tokenizer"
        )
    return codec


def prefix_of(source: Source, codec: TextCodec, found: Resolution) -> tuple[int, ...]:
    """Return the tokens that stand before every text, such as BOS: the tokenizer's, if the model knows them.

    Weights alone are taken to. A run does if its conversations begin with them: its text has none.
    """
    prefix = codec.prefix if isinstance(codec, HasPrefix) else ()
    if "data" not in source.tables or not prefix:
        return prefix
    data: Any = found.registry.build(found.recipe.data)
    if not isinstance(data, HasConversations):
        return ()
    try:
        begins, _ = data.answer_prompt([{"role": "user", "content": "Hi"}])
    except DataError:  # another tokenizer was named, since the folder is gone
        return ()
    return prefix if tuple(begins[: len(prefix)]) == prefix else ()
