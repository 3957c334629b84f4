"""The recipe table of the model ``transformer``, and its cross-checks. Never imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs

from nanotrain_core.errors import Problem
from nanotrain_core.layout.roles import Role
from nanotrain_core.recipe.divisibility import Divisible
from nanotrain_core.recipe.model_config import CachedToken, ModelConfig
from nanotrain_core.recipe.phase import CHANGEABLE
from nanotrain_core.recipe.range_validator import LARGEST_SIZE, MOST_LAYERS, Range
from nanotrain_core.recipe.tree import TRAINING_ONLY

if TYPE_CHECKING:
    from nanotrain_core.layout.layout import Layout
    from nanotrain_core.recipe.tree import Recipe


@attrs.define(frozen=True, kw_only=True)
class RopeScalingConfig:
    """``[model.rope_scaling]``: extend RoPE to sequences longer than those trained on."""

    type: Literal["llama3", "yarn", "linear", "dynamic"] = "llama3"
    """`linear` slows all pairs of elements down by `factor`, `llama3` (Llama 3.1) and `yarn` low-frequency
    ones; `dynamic` raises the base with the length of each batch's sequences, beyond `original_length`."""
    factor: float = attrs.field(default=8.0, validator=Range(1.0, 1e6))
    """Factor by which sequences become longer."""
    original_length: int = attrs.field(default=8192, validator=Range(1))
    """Length with which the model was trained before. Not for `linear`."""
    low_freq_factor: float = attrs.field(default=1.0, validator=Range(0.001, 1e6))
    """For `llama3`: pairs with fewer rotations over `original_length` are slowed down by `factor`."""
    high_freq_factor: float = attrs.field(default=4.0, validator=Range(0.001, 1e6))
    """For `llama3`: pairs with more rotations keep their frequency; those between, in part."""
    beta_fast: float = attrs.field(default=32.0, validator=Range(0.001, 1e6))
    """For `yarn`: pairs with more rotations than this over `original_length` keep their frequency."""
    beta_slow: float = attrs.field(default=1.0, validator=Range(0.001, 1e6))
    """For `yarn`: pairs with fewer rotations are slowed down by `factor`; those between, in part."""
    truncate: bool = True
    """For `yarn`: round the ends of the ramp to whole pairs."""
    attention_factor: float = attrs.field(default=0.0, validator=Range(0.0, 1e3))
    """For `yarn`: scales rotated elements, so attention scores by its square. 0 means 0.1 ln(`factor`) +
    1."""

    @high_freq_factor.validator
    def _higher(self, attribute: attrs.Attribute[float], value: float) -> None:
        if value <= self.low_freq_factor:
            raise ValueError(f"must be above low_freq_factor = {self.low_freq_factor}, got {value}")

    @beta_slow.validator
    def _slower(self, attribute: attrs.Attribute[float], value: float) -> None:
        if value >= self.beta_fast:
            raise ValueError(f"must be below beta_fast = {self.beta_fast}, got {value}")

    @property
    def magnitude(self) -> float:
        """Factor of the rotated elements."""
        return (self.attention_factor or yarn_magnitude(self.factor)) if self.type == "yarn" else 1.0

    def canonical(self) -> dict[str, Any]:
        """Return the keys that its type reads, including defaults."""
        table = {name: getattr(self, name) for name in ("type", "factor", *_READ[self.type])}
        return table | ({"attention_factor": self.magnitude} if self.type == "yarn" else {})


#: ``type`` of a scaling -> the keys that it reads, in addition to ``factor``.
_READ: Mapping[str, tuple[str, ...]] = {
    "linear": (),
    "dynamic": ("original_length",),
    "llama3": ("original_length", "low_freq_factor", "high_freq_factor"),
    "yarn": ("original_length", "beta_fast", "beta_slow", "truncate"),
}


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's factor of rotated elements. Source: arXiv 2309.00071, equation 22."""
    return 0.1 * weight * math.log(factor) + 1.0


#: The names in transformers of a layer's kind of attention.
LayerType = Literal["full_attention", "sliding_attention"]


@attrs.define(frozen=True, kw_only=True)
class TransformerConfig(ModelConfig):
    """``[model] use = "transformer"``: a decoder of GPT-2, Llama, Mistral or Qwen shape."""

    NOT_KEYS: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer"), "it is layers"),
        **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim"), "it is width"),
        **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads", "n_head"), "it is heads"),
        **dict.fromkeys(("num_key_value_heads", "n_kv_heads"), "it is kv_heads"),
        **dict.fromkeys(("intermediate_size", "ffn_size", "d_ff"), "it is ffn"),
        **dict.fromkeys(("max_position_embeddings", "block_size"), "it is max_length"),
        "head_dim": "it is head_size",
        "vocab_size": "it is vocab",
        "tie_word_embeddings": "it is tied",
        "rms_norm_eps": "it is norm_eps",
        "hidden_act": "it is activation",
        "sliding_window": "it is window",
    }

    layers: int = attrs.field(validator=Range(1, MOST_LAYERS))
    """Number of blocks."""
    width: int = attrs.field(validator=Range(1, LARGEST_SIZE))
    """Size D of the residual stream."""
    heads: int = attrs.field(validator=Range(1, LARGEST_SIZE))
    """Number of query heads."""
    kv_heads: int = attrs.field(default=0, validator=Range(0, LARGEST_SIZE))
    """Number of key and value heads: `heads` is MHA, 1 is MQA, between is GQA. 0 means as many as `heads`."""
    head_size: int = attrs.field(default=0, validator=Range(0, LARGEST_SIZE))
    """Size K of one head. 0 means `width / heads`."""
    ffn: int = attrs.field(default=0, validator=Range(0, LARGEST_SIZE))
    """Size F of the feed-forward layer. 0 means 4 x `width`."""
    vocab: int = attrs.field(validator=Range(2, LARGEST_SIZE))
    """Vocabulary size V."""
    max_length: int = attrs.field(default=0, validator=Range(0, LARGEST_SIZE), metadata={TRAINING_ONLY: True})
    """Rows of the table of learned positions, which requires it. 0 with RoPE: any length."""
    positions: Literal["rope", "learned"] = "rope"
    """Position encoding."""
    rope_theta: float = attrs.field(default=10000.0, validator=Range(1.0, 1e12), metadata={CHANGEABLE: True})
    """Base of the RoPE frequencies."""
    rope_scaling: RopeScalingConfig | None = attrs.field(default=None, metadata={CHANGEABLE: True})
    """Scaling of those frequencies; none without the table."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalization before attention, before the feed-forward layer and before the head."""
    norm_eps: float = attrs.field(default=1e-5, validator=Range(1e-30, 1.0))
    """Added to the variance."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """Feed-forward layer: SwiGLU has three matrices, GELU (tanh form) two."""
    bias: bool = False
    """Biases on the linear layers and LayerNorms."""
    attention_bias: bool | None = None
    """Biases on the linear layers of attention. Unset: as `bias` says."""
    output_bias: bool | None = None
    """A bias on attention's output projection, which Qwen2 lacks. Unset: as `attention_bias` says."""
    ffn_bias: bool | None = None
    """Biases on those of the feed-forward layer. Unset: as `bias` says."""
    qk_norm: bool = False
    """RMSNorm of each head's queries and keys, before RoPE, as in Qwen3 (arXiv 2505.09388)."""
    window: int = attrs.field(default=0, validator=Range(0, LARGEST_SIZE))
    """Tokens that one attends to, itself among them, in layers with sliding-window attention. 0: all."""
    layer_types: tuple[LayerType, ...] = ()
    """Which layers have that `window`: a pattern that is repeated over all layers. Empty: each has it."""
    tied: bool = False
    """Use the embedding table as the head."""
    init_std: float = attrs.field(default=0.02, validator=Range(1e-12, 10.0), metadata={TRAINING_ONLY: True})
    """Standard deviation of matrices; those that write to the residual stream use init_std / sqrt(2
    layers)."""

    def resolved(self) -> TransformerConfig:
        """Return the same model with every unset value replaced by its default."""
        attention_bias = self.bias if self.attention_bias is None else self.attention_bias
        return attrs.evolve(
            self,
            kv_heads=self.kv_heads or self.heads,
            head_size=self.head_size or self.width // self.heads,
            ffn=self.ffn or 4 * self.width,
            attention_bias=attention_bias,
            output_bias=attention_bias if self.output_bias is None else self.output_bias,
            ffn_bias=self.bias if self.ffn_bias is None else self.ffn_bias,
            window=self.window if any(map(self.window_of, range(self.layers))) else 0,
        )

    def type_of(self, layer: int) -> LayerType:
        """Return the kind of attention of a layer, numbered from 0."""
        if not self.window:
            return "full_attention"
        return self.layer_types[layer % len(self.layer_types)] if self.layer_types else "sliding_attention"

    def window_of(self, layer: int) -> int | None:
        """Return how many tokens one attends to in a layer; None: all."""
        return self.window if self.type_of(layer) == "sliding_attention" else None

    def canonical(self) -> dict[str, Any]:
        """Return the keys that define what its weights compute, in this model's canonical form."""
        table = attrs.asdict(self.resolved())
        table["layer_types"] = shortest_pattern([self.type_of(layer) for layer in range(self.layers)])
        if not table["window"]:
            del table["layer_types"]
        if self.positions != "rope":
            del table["rope_theta"], table["rope_scaling"]
        elif self.rope_scaling is not None:
            table["rope_scaling"] = self.rope_scaling.canonical()
        if self.norm == "rmsnorm":  # RMSNorm has no biases, and the linear layers' are explicit
            del table["bias"]
        return table

    def divisibility(self) -> Iterator[Divisible]:
        """Yield how finely its parts can be sharded."""
        yield Divisible((Role.VOCAB, Role.HEAD), "model.vocab", self.vocab, "tokens of the vocabulary")
        split, size = (Role.COLUMN, Role.ROW), self.head_size or self.width // self.heads
        yield Divisible(split, "model.heads", self.heads, "heads", heads=True, row=self.heads * size)
        if self.kv_heads:
            what = "key and value heads"
            yield Divisible((Role.COLUMN,), "model.kv_heads", self.kv_heads, what, grouped=True, heads=True)
        ffn = self.ffn or 4 * self.width
        yield Divisible(split, "model.ffn", ffn, "columns of the feed-forward layer", row=ffn)

    def cached_token(self) -> CachedToken:
        """Return keys and values of every layer; scores and values of every query head."""
        c = self.resolved()
        return CachedToken(
            elements=2 * c.layers * c.kv_heads * c.head_size,
            flops=4.0 * c.layers * c.heads * c.head_size,
            window=c.window,
            sliding=sum(c.window_of(layer) is not None for layer in range(c.layers)) / c.layers,
        )


def shortest_pattern(kinds: Sequence[LayerType]) -> list[LayerType]:
    """Return the shortest pattern that, repeated, gives the kinds of all layers.

    >>> shortest_pattern(["sliding_attention", "full_attention", "sliding_attention"])
    ['sliding_attention', 'full_attention']
    """
    sizes = range(1, len(kinds) + 1)
    size = next(n for n in sizes if all(kind == kinds[at % n] for at, kind in enumerate(kinds)))
    return [*kinds[:size]]


def check_transformer(recipe: Recipe, config: TransformerConfig, layout: Layout) -> Iterator[Problem]:
    """Check constraints between several fields."""
    kv_heads = config.kv_heads or config.heads
    if not config.head_size and config.width % config.heads:
        yield Problem(
            "model.heads",
            f"{config.heads} heads do not divide width {config.width}; set head_size or change heads",
        )
    elif config.positions == "rope" and config.resolved().head_size % 2:
        yield Problem("model.heads", "RoPE turns pairs of numbers: the size of a head must be even")
    elif config.rope_scaling and config.rope_scaling.type == "dynamic" and config.resolved().head_size < 4:
        yield Problem("model.rope_scaling.type", "'dynamic' needs heads of at least 4 numbers")
    if config.heads % kv_heads:
        yield Problem("model.kv_heads", f"{kv_heads} kv_heads do not divide {config.heads} heads")
    if config.rope_scaling and config.positions != "rope":
        yield Problem("model.rope_scaling", f"there is no RoPE with positions = {config.positions!r}")
    if config.positions == "learned" and not config.max_length:
        yield Problem("model.max_length", "learned positions need max_length, at least batch.length")
    if config.layer_types and not config.window:
        yield Problem("model.layer_types", "without window no layer has sliding-window attention; set window")
    if config.max_length and recipe.batch.length > config.max_length:
        yield Problem("batch.length", f"{recipe.batch.length} exceeds model.max_length = {config.max_length}")
