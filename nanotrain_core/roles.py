"""The vocabulary in which models and parallel wrappers meet.

A model tags each module with the part it plays, where it creates it. A wrapper reads the tags and
never a module's name or class, so a new model works with every wrapper and the reverse.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

import attrs

if TYPE_CHECKING:
    from torch import nn

    M = TypeVar("M", bound=nn.Module)


class Role(Enum):
    """What a module does with the width of the model."""

    VOCAB = "embedding table [V, D]: rows may be split over the vocabulary"
    POSITION = "learned positions [S, D]: same on every rank of a layer"
    COLUMN = "linear whose outputs may be split: each rank computes some of them from a whole input"
    ROW = "linear whose inputs may be split: each rank adds a partial sum of every output"
    REPLICATED = "linear kept whole on every rank, for example a low-rank latent projection"
    NORM = "normalisation over the width, with an element-wise weight"
    HEAD = "output projection [V, D] with the loss: logits may be split over the vocabulary"
    BLOCK = "one layer of the model: the unit of recomputation"
    ROUTER = "chooses experts per token: whole on every rank"
    EXPERTS = "stacked experts [E, ...]: may be split over experts"


@attrs.define(frozen=True)
class Tag:
    """A role, and how finely the split dimension may be cut."""

    role: Role
    unit: int = 1
    """Rows (COLUMN) or columns (ROW) that must stay on one rank, for example a head's size."""


_ATTRIBUTE = "nanotrain_tag"


def tag(module: M, role: Role, *, unit: int = 1) -> M:
    """Give ``module`` a role and return it: ``self.q = tag(nn.Linear(D, D), Role.COLUMN, unit=K)``."""
    setattr(module, _ATTRIBUTE, Tag(role, unit))
    return module


def tag_of(module: nn.Module) -> Tag | None:
    """Return the tag of ``module``, or None."""
    return getattr(module, _ATTRIBUTE, None)


def tagged(root: nn.Module) -> Iterator[tuple[str, nn.Module, Tag]]:
    """Yield (name, module, tag) of every tagged module below ``root``, outermost first."""
    for name, module in root.named_modules():
        found = tag_of(module)
        if found is not None:
            yield name, module, found
