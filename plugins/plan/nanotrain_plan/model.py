"""What a model has and computes, whatever the layout: parameters, and FLOPs of a token by convention.

Both are asked of the model itself: parameters by building it on ``meta``, FLOPs with ``Model.flops``.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from nanotrain_core.api import Part, Recipe, Registry, Role, Selection, tagged
from nanotrain_core.api.torch import Model


@attrs.define(frozen=True, kw_only=True)
class Parameters:
    """Numbers of elements."""

    total: int
    """Without modules for further tokens (MTP)."""
    mtp: int
    """Of these modules."""
    active: int
    """That a token meets: of experts, those it is sent to. The embedding counts."""
    by_kind: Mapping[str, int]
    """``embedding``, ``head``, ``experts`` and ``other``, which add up to :attr:`total`."""


@attrs.define(frozen=True, kw_only=True)
class TokenFLOPs:
    """Of forward and backward for one token: matrix products, 2 FLOPs for each weight and number."""

    matmul: float
    """Of weights, the head's included and the embedding's not."""
    head: float
    """Of :attr:`matmul`, the head's."""
    attention: float
    """Of scores and values, causal: a token attends to half of the sequence on average, or to a window."""
    whole_attention: float
    """The same if every token attended to the whole sequence."""
    mtp: float
    """Of modules for further tokens, their attention causal."""

    @property
    def causal(self) -> float:
        """Without further tokens."""
        return self.matmul + self.attention

    @property
    def non_causal(self) -> float:
        """As if every token attended to the whole sequence."""
        return self.matmul + self.whole_attention

    @property
    def model(self) -> float:
        """What :attr:`causal` becomes with further tokens: all that this recipe trains."""
        return self.causal + self.mtp


def without_mtp(selection: Selection) -> Selection:
    """Return the model without modules for further tokens, if it has a key ``mtp``."""
    if not getattr(selection.config, "mtp", 0):
        return selection
    return attrs.evolve(selection, config=attrs.evolve(selection.config, mtp=0))


def without_window(selection: Selection) -> Selection:
    """Return the model without sliding windows, if it has a key ``window``."""
    if not getattr(selection.config, "window", 0):
        return selection
    return attrs.evolve(selection, config=attrs.evolve(selection.config, window=0))


def count_parameters(recipe: Recipe, registry: Registry) -> Parameters:
    """Build the whole model on ``meta`` and count."""
    plain = _count(registry.build(without_mtp(recipe.model)))
    everything = _count(registry.build(recipe.model))
    total = sum(plain.values())
    config = recipe.model.config
    experts, chosen = getattr(config, "experts", 0), getattr(config, "top_k", 0)
    share = chosen / experts if experts else 1.0
    active = total - round(plain["experts"] * (1 - share))
    return Parameters(total=total, mtp=sum(everything.values()) - total, active=active, by_kind=plain)


def _count(model: Model) -> dict[str, int]:
    with torch.device("meta"):
        whole = model.build(Part.whole(model.layers))
    kinds = {Role.VOCAB: "embedding", Role.POSITION: "embedding", Role.HEAD: "head", Role.EXPERTS: "experts"}
    of = {}
    for name, _, tag in tagged(whole):
        if tag.role in kinds:
            of[f"{name}."] = kinds[tag.role]
    found = dict.fromkeys(("embedding", "head", "experts", "other"), 0)
    for name, parameter in whole.named_parameters():
        kind = next((kind for prefix, kind in of.items() if name.startswith(prefix)), "other")
        found[kind] += parameter.numel()
    return found


def count_flops(recipe: Recipe, registry: Registry) -> TokenFLOPs:
    """Ask the model, with its sequence length and without: what grows with it is attention."""
    length = recipe.batch.length
    plain: Model = registry.build(without_mtp(recipe.model))
    model: Model = registry.build(recipe.model)
    full: Model = registry.build(without_window(without_mtp(recipe.model)))
    causal, products = plain.flops(length).total, plain.flops(0)
    return TokenFLOPs(
        matmul=products.total,
        head=products.head,
        attention=causal - products.total,
        whole_attention=2 * (full.flops(length).total - products.total),
        mtp=model.flops(length).total - causal,
    )
