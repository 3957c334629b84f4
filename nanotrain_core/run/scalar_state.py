"""Checks that scalars and ``meta``, of which a checkpoint keeps one rank's, are the same on all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from math import isnan
from operator import eq
from typing import Any, TypeVar

from nanotrain_core.contracts import Block
from nanotrain_core.run.plain_json import remembered

K = TypeVar("K")
V = TypeVar("V")

#: What ``meta`` must be the same on all ranks: parts of a checkpoint's, by what they are of.
COMMON = {"loss_scale": "the loss scale", "optimizer": "the optimizer", "data": "the data"}


def scalars_of(blocks: Iterable[Block]) -> dict[str, float]:
    """Return the values of this rank's scalars by name."""
    return {block.name: float(block.tensor) for block in blocks if not block.global_shape}


def differing_scalar(ranks: Sequence[Mapping[str, float]]) -> str:
    """Return which scalar differs between ranks that have it, in words; empty if none does."""
    found = _first_difference(ranks, lambda one, two: one == two or (isnan(one) and isnan(two)))
    if found is None:
        return ""
    name, (other, known), (rank, value) = found
    state, _, parameter = name.partition("/")
    return (
        f"state '{state}' of {parameter} is {known:.8g} on rank {other} and {value:.8g} on rank "
        f"{rank}, and a checkpoint keeps one value of a scalar: expected the same on all ranks, "
        "or a tensor shaped as the weight"
    )


def digests(meta: Mapping[str, Any], *, data: bool) -> dict[tuple[str, str], str]:
    """Return each key of the ``meta`` of :data:`COMMON` as JSON, or a hash of it if that is long.

    ``data``: those of the data too. Loaders of a script may keep another state on each rank.

    Raises:
        PluginError: it is no JSON.
    """
    found = {}
    for part in COMMON:
        if part == "data" and not data:
            continue
        for key, value in remembered(meta.get(part, {})).items():
            text = json.dumps(value, sort_keys=True)
            found[part, key] = text if len(text) <= 40 else f"hash {sha256(text.encode()).hexdigest()[:8]}"
    return found


def differing_meta(ranks: Sequence[Mapping[tuple[str, str], str]]) -> str:
    """Return which key differs between ranks that have it, in words; empty if none does."""
    found = _first_difference(ranks, eq)
    if found is None:
        return ""
    (part, key), (other, known), (rank, value) = found
    return (
        f"'{key}' in the meta of {COMMON[part]} is {known} on rank {other} and {value} on rank "
        f"{rank}, and a checkpoint keeps that of one: expected the same on all ranks, as of "
        "maxima that are reduced over all"
    )


def _first_difference(
    ranks: Sequence[Mapping[K, V]], alike: Callable[[V, V], bool]
) -> tuple[K, tuple[int, V], tuple[int, V]] | None:
    """Return a key, and two ranks with their different values of it; None if all that have one agree."""
    first: dict[K, tuple[int, V]] = {}
    for rank, found in enumerate(ranks):
        for key, value in found.items():
            known = first.setdefault(key, (rank, value))
            if not alike(known[1], value):
                return key, known, (rank, value)
    return None
