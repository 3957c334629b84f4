"""A pipeline schedule as data: parts of a model, and actions on them. Torch-free."""

from __future__ import annotations

from typing import Literal

import attrs


@attrs.define(frozen=True)
class Part:
    """A run of consecutive layers, ``first`` to ``last`` exclusive, of a model with ``layers``."""

    first: int
    last: int
    layers: int

    @property
    def has_embedding(self) -> bool:
        return self.first == 0

    @property
    def has_head(self) -> bool:
        return self.last == self.layers

    @classmethod
    def whole(cls, layers: int) -> Part:
        return cls(0, layers, layers)


@attrs.define(frozen=True)
class Action:
    """One entry of a pipeline schedule."""

    kind: Literal["F", "B", "W"]
    """Forward; backward (with W: for inputs only); backward for weights."""
    stage: int
    microbatch: int
