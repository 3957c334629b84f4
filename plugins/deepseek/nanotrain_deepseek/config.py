"""The model's recipe table and its cross-checks. Never imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import attrs

from nanotrain_core.api import (
    CHANGEABLE,
    LARGEST_SIZE,
    MOST_LAYERS,
    TRAINING_ONLY,
    CachedToken,
    Divisible,
    ModelConfig,
    Problem,
    Range,
    Role,
    divisible_experts,
    yarn_magnitude,
)

if TYPE_CHECKING:
    from nanotrain_core.api import Layout, Recipe


@attrs.define(frozen=True, kw_only=True)
class YarnConfig:
    """``[model.yarn]``: extend RoPE to sequences longer than those trained on."""

    factor: float = attrs.field(default=40.0, validator=Range(1.0, 1e6, above=True))
    """Factor by which sequences become longer."""
    original_length: int = attrs.field(default=4096, validator=Range(1))
    """Length with which the model was trained before."""
    beta_fast: float = attrs.field(default=32.0, validator=Range(0.001, 1e6))
    """Pairs with more rotations than this over `original_length` keep their frequency."""
    beta_slow: float = attrs.field(default=1.0, validator=Range(0.001, 1e6))
    """Pairs with fewer rotations are slowed down by `factor`; those between, in part."""
    mscale: float = attrs.field(default=1.0, validator=Range(-1e3, 1e3))
    """Scales the rotated elements by m(mscale) / m(mscale_all_dim), where m(a) = 0.1 a ln(factor) + 1."""
    mscale_all_dim: float = attrs.field(default=1.0, validator=Range(0.0, 1e3))
    """Scales attention scores by m(mscale_all_dim) squared."""

    @beta_slow.validator
    def _slower(self, attribute: attrs.Attribute[float], value: float) -> None:
        if value >= self.beta_fast:
            raise ValueError(f"must be below beta_fast = {self.beta_fast}, got {value}")

    @property
    def magnitude(self) -> float:
        """Factor of the rotated elements."""
        return yarn_magnitude(self.factor, self.mscale) / yarn_magnitude(self.factor, self.mscale_all_dim)


#: Keys that have no meaning if every layer is dense.
_OF_EXPERTS = {
    "experts",
    "top_k",
    "shared_experts",
    "expert_ffn",
    "groups",
    "group_limit",
    "score",
    "normalize_weights",
    "route_scale",
}


@attrs.define(frozen=True, kw_only=True)
class DeepSeekConfig(ModelConfig):
    """``[model] use = "deepseek"``: defaults are V3's, except dimensions."""

    layers: int = attrs.field(validator=Range(1, MOST_LAYERS))
    """Number of blocks."""
    dense_layers: int = attrs.field(default=1, validator=Range(0, MOST_LAYERS))
    """Number of leading blocks with a dense feed-forward layer instead of experts."""
    width: int = attrs.field(validator=Range(1, LARGEST_SIZE))
    """Size D of the residual stream."""
    vocab: int = attrs.field(validator=Range(2, LARGEST_SIZE))
    """Vocabulary size V."""
    max_length: int = attrs.field(default=0, validator=Range(0, LARGEST_SIZE), metadata={TRAINING_ONLY: True})
    """Longest sequence in tokens; 0: any length."""

    heads: int = attrs.field(validator=Range(1, LARGEST_SIZE))
    """Number of attention heads."""
    q_rank: int = attrs.field(default=0, validator=Range(0, LARGEST_SIZE))
    """Size of the latent from which queries are computed (q_lora_rank); 0 computes them from the hidden
    state."""
    kv_rank: int = attrs.field(validator=Range(1, LARGEST_SIZE))
    """Size of the latent from which keys and values are computed (kv_lora_rank)."""
    nope_size: int = attrs.field(validator=Range(1, LARGEST_SIZE))
    """Elements of a query and key head without position."""
    rope_size: int = attrs.field(validator=Range(2, LARGEST_SIZE))
    """Elements with position; those of the key are shared by all heads."""
    value_size: int = attrs.field(validator=Range(1, LARGEST_SIZE))
    """Elements of a value head."""
    rope_theta: float = attrs.field(default=10000.0, validator=Range(1.0, 1e12), metadata={CHANGEABLE: True})
    """Base of the RoPE frequencies."""
    yarn: YarnConfig | None = attrs.field(default=None, metadata={CHANGEABLE: True})
    """Extends RoPE to longer sequences."""

    ffn: int = attrs.field(validator=Range(1, LARGEST_SIZE))
    """Width of a dense feed-forward layer."""
    experts: int = attrs.field(validator=Range(1, LARGEST_SIZE))
    """Routed experts E per layer."""
    top_k: int = attrs.field(validator=Range(1, LARGEST_SIZE))
    """Routed experts K per token."""
    shared_experts: int = attrs.field(default=1, validator=Range(0, LARGEST_SIZE))
    """Number of experts that process every token."""
    expert_ffn: int = attrs.field(validator=Range(1, LARGEST_SIZE))
    """Width F of one expert."""
    groups: int = attrs.field(default=1, validator=Range(1, LARGEST_SIZE))
    """Number of groups of consecutive experts; in V2's balance losses, the devices."""
    group_limit: int = attrs.field(default=0, validator=Range(0, LARGEST_SIZE))
    """Number of groups that the experts of one token may come from; 0: all."""

    score: Literal["sigmoid", "softmax"] = "sigmoid"
    """`sigmoid` with a bias for load balancing is V3's router, `softmax` without is V2's."""
    normalize_weights: bool = True
    """Divide the chosen experts' scores by their sum."""
    route_scale: float = attrs.field(default=1.0, validator=Range(0.0, 1e3, above=True))
    """Factor of the experts' weights."""
    bias_update_rate: float = attrs.field(
        default=0.0, validator=Range(0.0, 1.0), metadata={TRAINING_ONLY: True, CHANGEABLE: True}
    )
    """Change per step of the bias of an expert with too many or too few tokens (V3: 0.001); 0 keeps it
    fixed."""
    seq_balance: float = attrs.field(default=0.0, validator=Range(0.0, 1e3), metadata={TRAINING_ONLY: True})
    """Weight of V3's sequence-wise balance loss."""
    expert_balance: float = attrs.field(
        default=0.0, validator=Range(0.0, 1e3), metadata={TRAINING_ONLY: True}
    )
    """Weight of V2's expert-level balance loss."""
    device_balance: float = attrs.field(
        default=0.0, validator=Range(0.0, 1e3), metadata={TRAINING_ONLY: True}
    )
    """Weight of V2's device-level balance loss."""
    comm_balance: float = attrs.field(default=0.0, validator=Range(0.0, 1e3), metadata={TRAINING_ONLY: True})
    """Weight of V2's communication balance loss."""

    mtp: int = attrs.field(default=0, validator=Range(0, MOST_LAYERS))
    """Number of additional tokens predicted in training, each by a module of one layer (V3: 1)."""
    mtp_weight: float = attrs.field(
        default=0.3, validator=Range(0.0, 1e3), metadata={TRAINING_ONLY: True, CHANGEABLE: True}
    )
    """Weight of the loss of those tokens."""
    mtp_input: Literal["hidden_first", "embedding_first"] = "hidden_first"
    """Order in which such a module concatenates its inputs: as in the paper, or as in the released
    weights."""

    norm_eps: float = attrs.field(default=1e-6, validator=Range(1e-30, 1.0))
    """Added to the mean square."""
    tied: bool = False
    """Use the embedding table as the head."""
    init_std: float = attrs.field(default=0.006, validator=Range(1e-12, 10.0), metadata={TRAINING_ONLY: True})
    """Standard deviation of the initial values of every matrix."""

    @property
    def moe_layers(self) -> int:
        """Number of layers with experts, including those of the modules for further tokens."""
        return max(0, self.layers - self.dense_layers) + self.mtp

    @property
    def qk_size(self) -> int:
        """Size K of a query or key head."""
        return self.nope_size + self.rope_size

    @property
    def chosen_groups(self) -> int:
        """Maximum number of groups that one token's experts come from."""
        return self.group_limit or self.groups

    def canonical(self) -> dict[str, Any]:
        """Return the keys that define what the weights compute, in this model's canonical form."""
        unused: set[str] = set()
        if not self.dense_layers:
            unused |= {"ffn"}
        if not self.mtp:
            unused |= {"mtp_input"}
        if self.chosen_groups == self.groups:  # the groups are only those of balance losses
            unused |= {"groups", "group_limit"}
        if not self.moe_layers:
            unused |= _OF_EXPERTS
        table = attrs.asdict(self) | {"group_limit": self.chosen_groups}
        return {key: value for key, value in table.items() if key not in unused}

    def divisibility(self) -> Iterator[Divisible]:
        """Yield how finely its parts can be sharded."""
        split = (Role.COLUMN, Role.ROW)
        yield Divisible((Role.VOCAB, Role.HEAD), "model.vocab", self.vocab, "tokens of the vocabulary")
        yield Divisible(
            split, "model.heads", self.heads, "heads", heads=True, row=self.heads * self.value_size
        )
        if self.dense_layers:
            yield Divisible(
                split, "model.ffn", self.ffn, "columns of the dense feed-forward layers", row=self.ffn
            )
        yield from divisible_experts(self)
        if self.moe_layers and self.shared_experts:
            shared = self.shared_experts * self.expert_ffn
            yield Divisible(split, "model.expert_ffn", shared, "columns of the shared experts", row=shared)

    def cached_token(self) -> CachedToken:
        """Return the latent and the rotary key of every layer, which are shared by all heads.

        Queries and outputs are multiplied by the up-projections instead of keys and values, so that
        attention is over latents. Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.2 and table 1.
        """
        sizes = self.kv_rank + self.rope_size, self.kv_rank
        return CachedToken(elements=self.layers * sizes[0], flops=2.0 * self.layers * self.heads * sum(sizes))


def check_deepseek(recipe: Recipe, config: DeepSeekConfig, layout: Layout) -> Iterator[Problem]:
    """Check constraints between several fields."""
    c = config
    if c.dense_layers > c.layers:
        yield Problem("model.dense_layers", f"{c.dense_layers} exceeds the model's {c.layers} layers")
    if c.rope_size % 2:
        yield Problem("model.rope_size", f"{c.rope_size} is odd: RoPE turns pairs of numbers")
    if c.max_length and recipe.batch.length > c.max_length:
        yield Problem("batch.length", f"{recipe.batch.length} exceeds model.max_length = {c.max_length}")
    if c.mtp >= recipe.batch.length:
        yield Problem(
            "model.mtp", f"{c.mtp} further tokens leave none of batch.length = {recipe.batch.length}"
        )
    yield from _check_groups(c)
    yield from _check_losses(c)


def _check_groups(c: DeepSeekConfig) -> Iterator[Problem]:
    if c.top_k > c.experts:
        yield Problem("model.top_k", f"{c.top_k} exceeds the {c.experts} experts there are")
    if c.experts % c.groups:
        yield Problem("model.groups", f"{c.groups} groups do not divide {c.experts} experts")
        return
    size = c.experts // c.groups
    if c.group_limit > c.groups:
        yield Problem("model.group_limit", f"{c.group_limit} exceeds the {c.groups} groups there are")
    elif c.top_k > c.chosen_groups * size:
        least = -(-c.top_k // size)
        yield Problem(
            "model.group_limit",
            f"{c.group_limit} groups of {size} experts are too few for top_k = {c.top_k}: at least {least}",
        )
    if c.score == "sigmoid" and c.chosen_groups < c.groups and size < 2:
        yield Problem(
            "model.groups",
            f"{c.groups} groups of one expert: a group's score is the sum of its best two, "
            f"so at most {c.experts // 2} groups",
        )


def _check_losses(c: DeepSeekConfig) -> Iterator[Problem]:
    if c.score == "softmax" and c.bias_update_rate:
        yield Problem("model.bias_update_rate", "a softmax router has no bias: set it to 0 or leave it out")
    for name in ("expert_balance", "device_balance", "comm_balance"):
        weight = getattr(c, name)
        if weight and c.score != "softmax":
            yield Problem(f"model.{name}", f"is a loss on softmax scores, but score = '{c.score}'")
        if weight and name != "expert_balance" and c.groups == 1:
            yield Problem(f"model.{name}", "compares groups of experts: set model.groups to at least 2")
    names = ("seq_balance", "expert_balance", "device_balance", "comm_balance")
    weighted = [name for name in names if getattr(c, name)]
    if weighted and not c.moe_layers:
        yield Problem(f"model.{weighted[0]}", "balances experts, but every layer is dense")
