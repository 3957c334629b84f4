"""The model's recipe table and its cross-checks. Never imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import attrs

from nanotrain_core.api import (
    LARGEST_SIZE,
    MOST_LAYERS,
    TRAINING_ONLY,
    Divisible,
    Problem,
    Range,
    Role,
    TransformerConfig,
    check_transformer,
    divisible_experts,
)

if TYPE_CHECKING:
    from nanotrain_core.api import Layout, Recipe

#: Keys that have no meaning if every layer is dense, and those that have none if none is.
_OF_EXPERTS = {"experts", "top_k", "expert_ffn", "normalize_weights", "shared_expert_ffn"}
_OF_DENSE = {"ffn", "ffn_bias"}


@attrs.define(frozen=True, kw_only=True)
class MoETransformerConfig(TransformerConfig):
    """``[model] use = "moe_transformer"``: a decoder of Mixtral, Qwen2-MoE or Qwen3-MoE shape.

    The keys of `transformer`, with SwiGLU alone, and those of experts.
    """

    ffn: int = attrs.field(default=0, validator=Range(0, LARGEST_SIZE))
    """Size F of a dense feed-forward layer, where there are any. 0 means 4 x `width`."""
    activation: Literal["swiglu"] = "swiglu"
    """Of feed-forward layers and experts."""

    experts: int = attrs.field(validator=Range(1, LARGEST_SIZE))
    """Experts E per layer."""
    top_k: int = attrs.field(validator=Range(1, LARGEST_SIZE))
    """Experts K per token."""
    expert_ffn: int = attrs.field(validator=Range(1, LARGEST_SIZE))
    """Width F of one expert: `moe_intermediate_size` of Qwen's, `intermediate_size` of Mixtral."""
    normalize_weights: bool = True
    """Divide the chosen experts' scores by their sum: `norm_topk_prob`."""
    shared_expert_ffn: int = attrs.field(default=0, validator=Range(0, LARGEST_SIZE))
    """Width of one more expert, of all tokens, whose output each token weights by a sigmoid:
    `shared_expert_intermediate_size` of Qwen2-MoE. 0 means none."""
    decoder_sparse_step: int = attrs.field(default=1, validator=Range(1, MOST_LAYERS))
    """Every such layer has experts, beginning with layer `decoder_sparse_step` - 1: 1 is every layer."""
    mlp_only_layers: tuple[int, ...] = attrs.field(default=(), validator=Range(0, MOST_LAYERS))
    """Numbers of further layers with a dense feed-forward layer instead of experts; the first is 0."""
    aux_loss_coeff: float = attrs.field(
        default=0.001, validator=Range(0.0, 1e3), metadata={TRAINING_ONLY: True}
    )
    """Weight of the auxiliary loss that balances experts, summed over layers. Even load gives 1 per layer."""
    load_balancing_type: Literal["seq_aux_loss", "global_aux_loss"] = attrs.field(
        default="seq_aux_loss", metadata={TRAINING_ONLY: True}
    )
    """Whose tokens the auxiliary loss counts for each expert: those of the `seq`uence, or those of the whole
    batch of the step before, `global`."""

    def is_moe(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return (layer + 1) % self.decoder_sparse_step == 0 and layer not in self.mlp_only_layers

    @property
    def moe_layers(self) -> int:
        """Number of layers with experts."""
        return sum(map(self.is_moe, range(self.layers)))

    def canonical(self) -> dict[str, Any]:
        """Return the keys that define what its weights compute.

        ``mlp_only_layers`` has all dense layers.
        """
        dense = [layer for layer in range(self.layers) if not self.is_moe(layer)]
        unused = {"decoder_sparse_step"}
        unused |= set() if dense else _OF_DENSE
        unused |= set() if self.moe_layers else _OF_EXPERTS
        table = super().canonical() | {"mlp_only_layers": dense}
        return {key: value for key, value in table.items() if key not in unused}

    def divisibility(self) -> Iterator[Divisible]:
        """Yield how finely its parts can be sharded."""
        dense = self.moe_layers < self.layers
        yield from (each for each in super().divisibility() if dense or each.key != "model.ffn")
        yield from divisible_experts(self)
        if self.moe_layers and self.shared_expert_ffn:
            width, what = self.shared_expert_ffn, "columns of the shared expert"
            yield Divisible((Role.COLUMN, Role.ROW), "model.shared_expert_ffn", width, what, row=width)


def check_moe_transformer(recipe: Recipe, config: MoETransformerConfig, layout: Layout) -> Iterator[Problem]:
    """Check constraints between several fields."""
    c = config
    yield from check_transformer(recipe, c, layout)
    if c.top_k > c.experts:
        yield Problem("model.top_k", f"{c.top_k} exceeds the {c.experts} experts there are")
    beyond = [layer for layer in c.mlp_only_layers if layer >= c.layers]
    if beyond:
        yield Problem(
            "model.mlp_only_layers",
            f"there is no layer {beyond[0]}: the last of {c.layers} is {c.layers - 1}",
        )
