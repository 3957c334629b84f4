"""The table of ``routed``: a small mixture of experts with every role, to test wrappers without plugins."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from nanotrain_core.layout.roles import Role
from nanotrain_core.recipe.divisibility import Divisible
from nanotrain_core.recipe.model_config import ModelConfig


@attrs.define(frozen=True, kw_only=True)
class RoutedConfig(ModelConfig):
    """``[model] use = "routed"``."""

    layers: int = 2
    """Layers."""
    width: int = 32
    """Of the hidden states."""
    heads: int = 4
    """Of the attention."""
    vocab: int = 64
    """Tokens."""
    experts: int = 8
    """Per layer."""
    chosen: int = 2
    """Experts per token."""
    ffn: int = 12
    """Width of an expert, and of the shared one."""
    favored: int = 0
    """If not 0, all tokens choose among the first so many experts."""

    def divisibility(self) -> Iterator[Divisible]:
        """Yield how finely its parts can be sharded."""
        split = (Role.COLUMN, Role.ROW)
        yield Divisible((Role.VOCAB, Role.HEAD), "model.vocab", self.vocab, "tokens of the vocabulary")
        yield Divisible(split, "model.heads", self.heads, "heads")
        yield Divisible(split, "model.ffn", self.ffn, "columns of the shared expert")
        yield Divisible((Role.EXPERTS,), "model.experts", self.experts, "experts")
        yield Divisible((Role.EXPERTS,), "model.ffn", self.ffn, "columns of an expert", width=True)
