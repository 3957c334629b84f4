"""The names of a model's parameters in another library's checkpoints. Torch-free.

A model component with a mapping to Hugging Face ``transformers`` names a :class:`HFMapping` in
``Component.hf``. It only describes the mapping; reading, writing and all checks are done by the core.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs

from nanotrain_core.errors import NanotrainError


class HFError(NanotrainError):
    """A model without a mapping: one side has an option that the other lacks."""


@attrs.define(frozen=True)
class HFTensor:
    """A tensor of the other library to which one of our parameters, or some of its rows, corresponds."""

    name: str
    transposed: bool = False
    """Whether it is stored transposed, as GPT-2's are."""
    rows: Sequence[int] | None = None
    """Row i of ours is row ``rows[i]`` of theirs, counted after the transposition; None: the same rows.

    A ``range`` selects one of several matrices that are stored as one, a list changes the order. All
    parameters that share a Hugging Face tensor must together use each of its rows once.
    """
    columns: Sequence[int] | None = None
    """The same for axis 1. Parameters that share a tensor have different rows or different columns, not
    both."""


@attrs.define(frozen=True)
class ParameterMapping:
    """One of our parameters and the corresponding tensors of the other library.

    ``ParameterMapping("embed.weight", HFTensor("model.embed_tokens.weight"))``
    """

    name: str
    """Global name."""
    hf: HFTensor | tuple[HFTensor, ...]
    """One tensor, or as many as our parameter has on axis 0, one for each index: a matrix per expert."""


class HFMapping:
    """The base class of what ``Component.hf`` names. ``config`` is always of the component's config class."""

    model_types: Sequence[str]
    """The values of ``model_type`` in a ``config.json`` that this component can represent."""
    ignored: Sequence[str]
    """Regular expressions of tensors without weights, such as masks and frequencies: they are skipped."""

    def table(self, hf: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
        """Return the ``[model]`` table, without ``use``, for the contents of a ``config.json``.

        Args:
            hf: contents of ``config.json``.
            tensors: the existing names, for tensors that a config implies and files may lack.

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
        """Yield the same for files whose ``config.json`` is ``hf``: it may specify how a tensor is stored."""
        return self.mappings(config)

    def empty(self, config: Any) -> Iterable[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of tensors that have no elements in the other library, as without experts."""
        return ()


def expect(hf: Mapping[str, Any], key: str, *allowed: Any) -> Any:
    """Return a value of a ``config.json``, by default the first of ``allowed``.

    Raises:
        HFError: it is none of ``allowed``.
    """
    value = hf.get(key, allowed[0])
    if value not in allowed:
        choices = " or ".join(map(repr, allowed))
        raise HFError(f"config.json: {key} is {value!r}; only {choices} can be represented")
    return value


def expect_flag(hf: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return a boolean of a ``config.json``; ``default`` if missing, false if null.

    Raises:
        HFError: it is something else.
    """
    value = hf.get(key, default)
    if not isinstance(value, bool | None):
        raise HFError(f"config.json: {key} is {value!r}; expected true or false")
    return bool(value)


def expect_real(hf: Mapping[str, Any], key: str, default: float) -> float:
    """Return a number of a ``config.json``, ``default`` if missing.

    Raises:
        HFError: it is not a finite number.
    """
    value = hf.get(key, default)
    if type(value) not in (int, float) or not abs(value) < 1e300:
        raise HFError(f"config.json: {key} is {value!r}; expected a finite number")
    return float(value)


def expect_size(hf: Mapping[str, Any], key: str) -> int:
    """Return a required size of a ``config.json``.

    Raises:
        HFError: it is missing, or not a number above 0.
    """
    value = hf.get(key)
    if type(value) is not int or value < 1:
        found = "missing" if value is None else repr(value)
        raise HFError(f"config.json: {key} is {found}; expected an integer above 0")
    return value
