"""The recipe tables of the built-in components, and their cross-checks. Never imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs

from nanotrain_core.data.survey import Survey
from nanotrain_core.errors import Problem
from nanotrain_core.layout.roles import Role
from nanotrain_core.recipe.cached_token import CachedToken
from nanotrain_core.recipe.divisibility import Divisible
from nanotrain_core.recipe.phase import CHANGES
from nanotrain_core.recipe.ranges import LARGEST_SIZE, MOST_LAYERS, Range
from nanotrain_core.recipe.tree import FOUR_MONTHS, TRAINING, OptimizerConfig, path_field

if TYPE_CHECKING:
    from nanotrain_core.layout.layout import Layout
    from nanotrain_core.recipe.tree import Recipe


@attrs.define(frozen=True, kw_only=True)
class GridConfig:
    """``[topology] use = "grid"``: degrees whose product divides the world size."""

    NOT_KEYS: ClassVar[Mapping[str, str]] = {
        "dp": "dp is what pp, cp and tp leave of run.ranks",
        "edp": "edp is what pp, ep and etp leave of run.ranks",
    }

    pp: int = attrs.field(default=1, validator=Range(1))
    """Pipeline stages."""
    cp: int = attrs.field(default=1, validator=Range(1))
    """Ranks that share one sequence."""
    tp: int = attrs.field(default=1, validator=Range(1))
    """Ranks that share one layer."""
    ep: int = attrs.field(default=1, validator=Range(1))
    """Ranks that share one layer's experts, folded over dp x cp x tp."""
    etp: int = attrs.field(default=1, validator=Range(1))
    """Ranks that share one expert."""


@attrs.define(frozen=True, kw_only=True)
class AutoKernelsConfig:
    """``[kernels] use = "auto"``: what an installed plugin provides for the run's device, else ``torch``."""


@attrs.define(frozen=True, kw_only=True)
class TorchKernelsConfig:
    """``[kernels] use = "torch"``: plain PyTorch."""


@attrs.define(frozen=True, kw_only=True)
class RopeScalingConfig:
    """``[model.rope_scaling]``: stretch RoPE to sequences longer than those trained on."""

    type: Literal["llama3", "yarn", "linear", "dynamic"] = "llama3"
    """`linear` slows all pairs of numbers down by `factor`, `llama3` (Llama 3.1) and `yarn` those that turn
    seldom; `dynamic` raises the base with the length of each batch's sequences, beyond `original_length`."""
    factor: float = attrs.field(default=8.0, validator=Range(1.0, 1e6))
    """How many times longer sequences become."""
    original_length: int = attrs.field(default=8192, validator=Range(1))
    """Length the model was trained on before. Not of `linear`."""
    low_freq_factor: float = attrs.field(default=1.0, validator=Range(0.001, 1e6))
    """Of `llama3`: pairs that turn fewer times over `original_length` are slowed down by `factor`."""
    high_freq_factor: float = attrs.field(default=4.0, validator=Range(0.001, 1e6))
    """Of `llama3`: pairs that turn more often keep their frequency; those between, in part."""
    beta_fast: float = attrs.field(default=32.0, validator=Range(0.001, 1e6))
    """Of `yarn`: pairs that turn more often than this over `original_length` keep their frequency."""
    beta_slow: float = attrs.field(default=1.0, validator=Range(0.001, 1e6))
    """Of `yarn`: pairs that turn less often are slowed down by `factor`; those between, in part."""
    truncate: bool = True
    """Of `yarn`: count those pairs in whole numbers."""
    attention_factor: float = attrs.field(default=0.0, validator=Range(0.0, 1e3))
    """Of `yarn`: scales rotated numbers, so attention scores by its square. 0 means 0.1 ln(`factor`) + 1."""

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
        """What rotated numbers are multiplied by."""
        return (self.attention_factor or yarn_magnitude(self.factor)) if self.type == "yarn" else 1.0

    def canonical(self) -> dict[str, Any]:
        """Return the keys that its type reads, each spelled out."""
        table = {name: getattr(self, name) for name in ("type", "factor", *_READ[self.type])}
        return table | ({"attention_factor": self.magnitude} if self.type == "yarn" else {})


#: ``type`` of a scaling -> the keys that it reads, besides ``factor``.
_READ: Mapping[str, tuple[str, ...]] = {
    "linear": (),
    "dynamic": ("original_length",),
    "llama3": ("original_length", "low_freq_factor", "high_freq_factor"),
    "yarn": ("original_length", "beta_fast", "beta_slow", "truncate"),
}


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Return how much larger YaRN makes rotated numbers. Source: arXiv 2309.00071, equation 22."""
    return 0.1 * weight * math.log(factor) + 1.0


@attrs.define(frozen=True, kw_only=True)
class TransformerConfig:
    """``[model] use = "transformer"``: a decoder of GPT-2 or Llama shape."""

    layers: int = attrs.field(validator=Range(1, MOST_LAYERS))
    """Blocks."""
    width: int = attrs.field(validator=Range(1, LARGEST_SIZE))
    """Size D of the residual stream."""
    heads: int = attrs.field(validator=Range(1, LARGEST_SIZE))
    """Query heads."""
    kv_heads: int = attrs.field(default=0, validator=Range(0, LARGEST_SIZE))
    """Key and value heads: `heads` is MHA, 1 is MQA, between is GQA. 0 means as many as `heads`."""
    head_size: int = attrs.field(default=0, validator=Range(0, LARGEST_SIZE))
    """Size K of one head. 0 means `width / heads`."""
    ffn: int = attrs.field(default=0, validator=Range(0, LARGEST_SIZE))
    """Size F of the feed-forward layer. 0 means 4 x `width`."""
    vocab: int = attrs.field(validator=Range(2, LARGEST_SIZE))
    """Vocabulary size V."""
    max_length: int = attrs.field(default=0, validator=Range(0, LARGEST_SIZE), metadata={TRAINING: True})
    """Rows of the table of learned positions, which needs it. 0 with RoPE: any length."""
    positions: Literal["rope", "learned"] = "rope"
    """How a token knows where it stands."""
    rope_theta: float = attrs.field(default=10000.0, validator=Range(1.0, 1e12), metadata={CHANGES: True})
    """Base of the RoPE frequencies."""
    rope_scaling: RopeScalingConfig | None = attrs.field(default=None, metadata={CHANGES: True})
    """Of those frequencies; without the table none."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalisation before attention, before the feed-forward layer and before the head."""
    norm_eps: float = attrs.field(default=1e-5, validator=Range(1e-30, 1.0))
    """Added to the variance."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """Feed-forward layer: SwiGLU has three matrices, GELU (tanh form) two."""
    bias: bool = False
    """Biases on the linear layers and LayerNorms."""
    attention_bias: bool | None = None
    """Biases on the linear layers of attention. Unset: as `bias` says."""
    ffn_bias: bool | None = None
    """Biases on those of the feed-forward layer. Unset: as `bias` says."""
    tied: bool = False
    """Use the embedding table as the head."""
    init_std: float = attrs.field(default=0.02, validator=Range(1e-12, 10.0), metadata={TRAINING: True})
    """Of matrices; those that write to the residual stream start at init_std / sqrt(2 layers)."""

    def resolved(self) -> TransformerConfig:
        """Return the same model with every value spelled out that may be left unset."""
        return attrs.evolve(
            self,
            kv_heads=self.kv_heads or self.heads,
            head_size=self.head_size or self.width // self.heads,
            ffn=self.ffn or 4 * self.width,
            attention_bias=self.bias if self.attention_bias is None else self.attention_bias,
            ffn_bias=self.bias if self.ffn_bias is None else self.ffn_bias,
        )

    def canonical(self) -> dict[str, Any]:
        """Return what its weights compute, in the one form that all recipes of this model share."""
        table = attrs.asdict(self.resolved())
        if self.positions != "rope":
            del table["rope_theta"], table["rope_scaling"]
        elif self.rope_scaling is not None:
            table["rope_scaling"] = self.rope_scaling.canonical()
        if self.norm == "rmsnorm":  # has no biases, and the linear layers' are spelled out
            del table["bias"]
        return table

    def divisibility(self) -> Iterator[Divisible]:
        """Yield how finely its parts can be split."""
        yield Divisible((Role.VOCAB, Role.HEAD), "model.vocab", self.vocab, "tokens of the vocabulary")
        split, size = (Role.COLUMN, Role.ROW), self.head_size or self.width // self.heads
        yield Divisible(split, "model.heads", self.heads, "heads", heads=True, row=self.heads * size)
        if self.kv_heads:
            what, row = "key and value heads", self.kv_heads * size if self.bias else 0
            yield Divisible(
                (Role.COLUMN,), "model.kv_heads", self.kv_heads, what, grouped=True, heads=True, row=row
            )
        ffn = self.ffn or 4 * self.width
        yield Divisible(split, "model.ffn", ffn, "columns of the feed-forward layer", row=ffn)

    def cached_token(self) -> CachedToken:
        """Return keys and values of every layer; scores and values of every query head."""
        c = self.resolved()
        return CachedToken(
            elements=2 * c.layers * c.kv_heads * c.head_size, flops=4.0 * c.layers * c.heads * c.head_size
        )


def check_transformer(recipe: Recipe, config: TransformerConfig, layout: Layout) -> Iterator[Problem]:
    """Check what one field alone cannot."""
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
    if config.max_length and recipe.batch.length > config.max_length:
        yield Problem("batch.length", f"{recipe.batch.length} exceeds model.max_length = {config.max_length}")


@attrs.define(frozen=True, kw_only=True)
class RecomputeConfig:
    """``[[parallel]] use = "recompute"``: activation checkpointing."""

    granularity: Literal["full", "selective"] = "full"
    """What is computed again in backward. `full`: all of a layer, which keeps its input alone, for a third
    more computing. `selective`: all but matrix products and attention, whose results are kept: norms, RoPE,
    activation functions and casts, which take memory and little time."""
    every: int = attrs.field(default=1, validator=Range(1))
    """1: all layers of a stage; 2: every second one, for half of the memory and half of the time."""


def _expect_decay_below_one(lr: float, weight_decay: float) -> None:
    if lr * weight_decay >= 1:
        raise ValueError(
            f"a step takes lr x weight_decay = {lr:g} x {weight_decay:g} = {lr * weight_decay:g} of each "
            "weight away; expected less than 1"
        )


@attrs.define(frozen=True, kw_only=True)
class AdamWConfig(OptimizerConfig):
    """``[optimizer] use = "adamw"``."""

    betas: tuple[float, float] = attrs.field(default=(0.9, 0.95), validator=Range(0.0, 1.0, below=True))
    """Decay of the first and second moment."""
    eps: float = attrs.field(default=1e-8, validator=Range(1e-30, 1.0))
    """Added to the root of the second moment."""
    weight_decay: float = attrs.field(default=0.1, validator=Range(0.0, 1e3))
    """Decoupled decay of tensors with two or more dimensions; norms and biases are not decayed."""
    moment_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Of both moments between steps. `float32` is as wide as the master weight, `bfloat16` half of it; `int8`
    is companded, with a scale for 32 numbers of a row. Resume with the same."""

    @weight_decay.validator
    def _leaves_weights(self, field: Any, value: float) -> None:
        _expect_decay_below_one(self.lr, value)


@attrs.define(frozen=True, kw_only=True)
class SGDConfig(OptimizerConfig):
    """``[optimizer] use = "sgd"``."""

    momentum: float = attrs.field(default=0.0, validator=Range(0.0, 1.0, below=True))
    """Decay of the velocity; 0 keeps no state."""
    weight_decay: float = attrs.field(default=0.0, validator=Range(0.0, 1e3))
    """Added to the gradient of tensors with two or more dimensions, times the weight."""

    @weight_decay.validator
    def _leaves_weights(self, field: Any, value: float) -> None:
        _expect_decay_below_one(self.lr, value)


@attrs.define(frozen=True, kw_only=True)
class PrecisionConfig:
    """``[precision] use = "fp64" | "fp32" | "bf16"``: no keys."""


#: A dynamic loss scale grows no further: beyond, the scaled loss itself would overflow.
LARGEST_SCALE = 2.0**24


@attrs.define(frozen=True, kw_only=True)
class FP16Config:
    """``[precision] use = "fp16"``: the dynamic loss scale."""

    initial_scale: float = attrs.field(default=2.0**16, validator=Range(2.0**-24, LARGEST_SCALE))
    """Loss scale of the first step, at most 2**24."""
    growth_interval: int = attrs.field(default=2000, validator=Range(1))
    """Steps without overflow after which the scale doubles. An overflow halves it and skips the step."""


@attrs.define(frozen=True, kw_only=True)
class AccumulateConfig:
    """``[schedule] use = "accumulate"``: no keys."""


@attrs.define(frozen=True, kw_only=True)
class SimpleCheckpointConfig:
    """``[checkpoint] use = "simple"``."""

    every: int = attrs.field(default=0, validator=Range(0))
    """Steps between checkpoints; 0 saves only at the end."""
    keep: int = attrs.field(default=2, validator=Range(1))
    """Newest checkpoints to keep. The newest of those before the last finite validation loss stays, too."""


@attrs.define(frozen=True, kw_only=True)
class ConsoleConfig:
    """``[[monitor]] use = "console"``."""

    style: Literal["auto", "lines", "table"] = "auto"
    """`auto` is a panel on a terminal, and `lines` elsewhere or with `NO_COLOR`; `table` has a row for each
    step."""
    every: int = attrs.field(default=1, validator=Range(1))
    """Steps between lines or rows; the panel follows every report."""
    metrics: tuple[str, ...] = ()
    """Published metrics to show too, each a name or a pattern: `"gradients/norm/*"`. `nanotrain metrics`
    lists them."""


@attrs.define(frozen=True, kw_only=True)
class JsonlConfig:
    """``[[monitor]] use = "jsonl"``: no keys."""


@attrs.define(frozen=True, kw_only=True)
class SampleConfig:
    """``[[monitor]] use = "sample"``: text written by the model, on rank 0."""

    prompt: str = "\n"
    """What the model continues."""
    tokens: int = attrs.field(default=200, validator=Range(1, 1_000_000))
    """Tokens to write."""
    temperature: float = attrs.field(default=0.8, validator=Range(0.0, 100.0))
    """0 always takes the likeliest token."""
    every: int = attrs.field(default=0, validator=Range(0))
    """Steps between samples; 0 writes one at the end."""


@attrs.define(frozen=True, kw_only=True)
class ReplicasConfig:
    """``[[monitor]] use = "replicas"``: every bit of the weights compared, and memory of every rank."""

    every: int = attrs.field(default=1, validator=Range(1))
    """Steps between comparisons; every checkpoint is compared before it is written. With `zero12` or master
    weights only 1 finds every flip: each update writes copies anew."""


@attrs.define(frozen=True, kw_only=True)
class GuardConfig:
    """``[[monitor]] use = "guard"``: notices when training goes wrong, and takes it back."""

    window: int = attrs.field(default=128, validator=Range(8, 1_000_000))
    """Good losses to compare with, the most recent ones."""
    warmup: int = attrs.field(default=32, validator=Range(4))
    """Good losses to have seen before any is called a spike."""
    threshold: float = attrs.field(default=8.0, validator=Range(0.1, 1e6))
    """A spike is this many robust standard deviations (1.4826 x MAD, at least 1% of the median) above the
    median of the window."""
    patience: int = attrs.field(default=3, validator=Range(1))
    """Bad steps in a row before the run goes back; fewer recover by themselves."""
    margin: int = attrs.field(default=1, validator=Range(0))
    """Steps before the first bad one whose updates are suspected too: a loss shows the update before it."""
    max_rollbacks: int = attrs.field(default=3, validator=Range(0))
    """How often the run goes back before it is given up."""


@attrs.define(frozen=True, kw_only=True)
class StragglersConfig:
    """``[[monitor]] use = "stragglers"``: which rank makes the others wait, and which link is slow."""

    every: int = attrs.field(default=5, validator=Range(1))
    """Logged steps whose number this divides are compared."""
    links: int = attrs.field(default=50, validator=Range(0))
    """So are links, in logged steps whose number this divides: a few small messages, for which ranks wait.
    0: never."""
    ratio: float = attrs.field(default=2.0, validator=Range(1.0, 1e6))
    """A rank is slow in a phase that takes it this many times as long as the median rank; links likewise."""
    least: float = attrs.field(default=0.01, validator=Range(0.0, FOUR_MONTHS))
    """Seconds a step below which nobody is called slow."""
    patience: int = attrs.field(default=3, validator=Range(1))
    """Comparisons in a row that find the same rank before it is named."""


@attrs.define(frozen=True, kw_only=True)
class TextConfig:
    """``[data] use = "text"``."""

    paths: tuple[str, ...] = path_field(default=())
    """Files and folders, relative to the recipe or absolute. None: the Python standard library's source."""
    suffixes: tuple[str, ...] = (".txt", ".md", ".py")
    """Which files of a folder are read."""
    tokenizer: str = path_field(default="bytes", words=("bytes",))
    """`bytes` (256 tokens), or the path of a Hugging Face `tokenizer.json`."""
    validation_fraction: float = attrs.field(default=0.05, validator=Range(0.0, 1.0, below=True))
    """Share of the sequences held out, spread evenly over the text."""
    piece_length: int = attrs.field(default=0, validator=Range(0, LARGEST_SIZE))
    """Tokens of the pieces of text that are held out as a whole. 0: the longest sequence of the recipe and
    its phases. A run that is to be resumed with longer sequences needs their length from its beginning."""
    mask_documents: bool = False
    """Whether tokens attend to those of their own document alone, where documents share a sequence."""


def masks_documents(config: Any) -> tuple[str, ...]:
    """Return what data requires of a model with that config: see ``Component.requires_for``."""
    return ("document_masks",) if config.mask_documents else ()


@attrs.define(frozen=True, kw_only=True)
class SyntheticConfig:
    """``[data] use = "synthetic"``: a random Markov chain, learnable down to its entropy."""

    vocab: int = attrs.field(validator=Range(2, LARGEST_SIZE))
    """Number of tokens."""
    branching: int = attrs.field(default=4, validator=Range(1, LARGEST_SIZE))
    """Tokens that can follow each token, at most `vocab`."""
    sequences: int = attrs.field(default=4096, validator=Range(1))
    """Sequences in one epoch of training data."""
    validation_sequences: int = attrs.field(default=256, validator=Range(0))
    """Sequences held out."""

    @branching.validator
    def _fits(self, attribute: attrs.Attribute[int], value: int) -> None:
        if value > self.vocab:
            raise ValueError(f"{value} different tokens cannot follow each of {self.vocab}")


def survey_synthetic(config: SyntheticConfig, length: int, longest: int = 0) -> Survey:
    """Return what there will be, of any length."""
    return Survey(vocab=config.vocab, train=config.sequences, validation=config.validation_sequences)
