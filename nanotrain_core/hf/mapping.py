"""How a model's parameters are called in another library's checkpoints. Torch-free.

A model component that has a mapping in Hugging Face ``transformers`` names a :class:`HFMapping` in
``Component.hf``. It only says what is where; reading, writing and all checks are the core's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs

from nanotrain_core.errors import NanotrainError


class HFError(NanotrainError):
    """A model has no mapping on the other side: an option that one of the two does not have."""


@attrs.define(frozen=True)
class HFTensor:
    """A tensor of the other library that one of our parameters is, or is some rows of."""

    name: str
    transposed: bool = False
    """Stored with its two axes exchanged, as GPT-2's are."""
    rows: Sequence[int] | None = None
    """Row i of ours is row ``rows[i]`` of theirs, counted after the exchange; None: the same rows.

    A ``range`` picks one of several matrices that are stored as one, a list changes the order. All
    parameters that share a Hugging Face tensor must together use each of its rows once.
    """
    columns: Sequence[int] | None = None
    """The same of axis 1. Parameters that share a tensor have other rows each, or other columns, not both."""


@attrs.define(frozen=True)
class ParameterMapping:
    """One of our parameters and where it is over there.

    ``ParameterMapping("embed.weight", HFTensor("model.embed_tokens.weight"))``
    """

    name: str
    """Global name."""
    hf: HFTensor | tuple[HFTensor, ...]
    """One tensor, or as many as our parameter has on axis 0, one for each index: a matrix per expert."""


class HFMapping:
    """What ``Component.hf`` names: a base class. Every ``config`` is one of the component's config class."""

    model_types: Sequence[str]
    """The values of ``model_type`` in a ``config.json`` that this component can represent."""
    ignored: Sequence[str]
    """Regular expressions of tensors that hold no weights, as masks and frequencies: they are left out."""

    def table(self, hf: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
        """Return the ``[model]`` table, without ``use``, for the contents of a ``config.json``.

        Args:
            hf: what ``config.json`` holds.
            tensors: the names that are there, for what a config promises and files may lack.

        Raises:
            HFError: it has an option that this component cannot represent.
        """
        raise NotImplementedError(f"{type(self).__name__} has no table(hf, tensors)")

    def config(self, config: Any) -> dict[str, Any]:
        """Return the contents of a ``config.json``, with ``model_type`` and ``architectures``.

        Raises:
            HFError: the other library has no such model.
        """
        raise NotImplementedError(f"{type(self).__name__} has no config(config)")

    def mappings(self, config: Any) -> Iterable[ParameterMapping]:
        """Yield every parameter of the whole model once, layer by layer, as it is written."""
        raise NotImplementedError(f"{type(self).__name__} has no mappings(config)")

    def mappings_in(self, config: Any, hf: Mapping[str, Any]) -> Iterable[ParameterMapping]:
        """Yield the same for files whose ``config.json`` is ``hf``: it may say how a tensor is stored."""
        return self.mappings(config)

    def empty(self, config: Any) -> Iterable[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of tensors that the other library has without any number, as of no experts."""
        return ()


def expect(hf: Mapping[str, Any], key: str, *allowed: Any) -> Any:
    """Return a value of a ``config.json``, the first of ``allowed`` where it has none.

    Raises:
        HFError: it is none of ``allowed``.
    """
    value = hf.get(key, allowed[0])
    if value not in allowed:
        choices = " or ".join(map(repr, allowed))
        raise HFError(f"config.json: {key} is {value!r}; only {choices} can be represented")
    return value


def expect_flag(hf: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return a truth value of a ``config.json``; ``default`` where it has none, false where it says null.

    Raises:
        HFError: it is something else.
    """
    value = hf.get(key, default)
    if not isinstance(value, bool | None):
        raise HFError(f"config.json: {key} is {value!r}; expected true or false")
    return bool(value)


def expect_real(hf: Mapping[str, Any], key: str, default: float) -> float:
    """Return a number of a ``config.json``, ``default`` where it has none.

    Raises:
        HFError: it is no finite number.
    """
    value = hf.get(key, default)
    if type(value) not in (int, float) or not abs(value) < 1e300:
        raise HFError(f"config.json: {key} is {value!r}; expected a finite number")
    return float(value)


def expect_size(hf: Mapping[str, Any], key: str) -> int:
    """Return a size that a ``config.json`` must have.

    Raises:
        HFError: it does not, or it is no number above 0.
    """
    value = hf.get(key)
    if type(value) is not int or value < 1:
        found = "missing" if value is None else repr(value)
        raise HFError(f"config.json: {key} is {found}; expected an integer above 0")
    return value
