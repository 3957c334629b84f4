"""A data component's report on its data before any process starts. Never imports torch."""

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
    """The result of ``Component.survey``. None: known only when the data is opened."""

    vocab: int | None = attrs.field(default=None, validator=_count)
    """Vocabulary size in tokens, ``vocab_size`` of the opened data."""
    train: int | None = attrs.field(default=None, validator=_count)
    """Number of training sequences, if a batch cannot be larger."""
    validation: int | None = attrs.field(default=None, validator=_count)
    """Number of held-out sequences."""
    problems: tuple[Problem, ...] = attrs.field(default=(), converter=_problems)
    """What is missing or unreadable on this machine, each under its recipe key."""
