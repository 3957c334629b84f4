"""What a data component says of its data before any process starts. Never imports torch."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from attrs.validators import ge, optional

from nanotrain_core.errors import Problem

_count = optional(ge(0))


def _problems(value: Iterable[Problem]) -> tuple[Problem, ...]:
    found = tuple(value)
    for problem in found:
        if not isinstance(problem, Problem):
            raise TypeError(f"problems are Problem(key, message), got {problem!r}")
    return found


@attrs.define(frozen=True, kw_only=True)
class Survey:
    """What ``Component.survey`` returns. None: known only when the data is opened."""

    vocab: int | None = attrs.field(default=None, validator=_count)
    """Tokens of the vocabulary, ``vocab_size`` of the opened data."""
    train: int | None = attrs.field(default=None, validator=_count)
    """Training sequences, if one batch can take no more than there are."""
    validation: int | None = attrs.field(default=None, validator=_count)
    """Sequences held out."""
    problems: tuple[Problem, ...] = attrs.field(default=(), converter=_problems)
    """What is missing or cannot be read on this machine, each under the key that names it."""
