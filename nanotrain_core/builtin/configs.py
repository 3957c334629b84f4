"""The recipe tables of the built-in components, and their cross-checks. Never imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import attrs

from nanotrain_core.component import NotCaptured
from nanotrain_core.data.survey import Survey
from nanotrain_core.layout.layout import Layout
from nanotrain_core.recipe.range_validator import LARGEST_SIZE, Range
from nanotrain_core.recipe.tree import FOUR_MONTHS, OptimizerConfig, Recipe, path_field


@attrs.define(frozen=True, kw_only=True)
class GridConfig:
    """``[topology] use = "grid"``: degrees whose product divides the world size."""

    NOT_KEYS: ClassVar[Mapping[str, str]] = {
        "dp": "dp is what pp, cp and tp leave of run.ranks",
        "edp": "edp is what pp, ep and etp leave of run.ranks",
        **dict.fromkeys(("tensor", "tensor_parallel", "tensor_parallel_size"), "it is tp"),
        **dict.fromkeys(("pipeline", "pipeline_parallel", "pipeline_parallel_size"), "it is pp"),
        **dict.fromkeys(("context_parallel", "context_parallel_size"), "it is cp"),
        **dict.fromkeys(("expert_parallel", "expert_parallel_size"), "it is ep"),
    }

    pp: int = attrs.field(default=1, validator=Range(1))
    """Number of pipeline stages."""
    cp: int = attrs.field(default=1, validator=Range(1))
    """Number of ranks that split each sequence."""
    dp_shard: int | None = attrs.field(default=None, validator=Range(1))
    """Hybrid sharding: a component that shards weights along dp does so over this many neighboring ranks of
    it, and replicates them along the rest. Omit to shard over all of dp."""
    tp: int = attrs.field(default=1, validator=Range(1))
    """Number of ranks that shard each layer."""
    ep: int = attrs.field(default=1, validator=Range(1))
    """Number of ranks that shard each layer's experts, folded over dp x cp x tp."""
    etp: int = attrs.field(default=1, validator=Range(1))
    """Number of ranks that shard each expert."""


@attrs.define(frozen=True, kw_only=True)
class AutoKernelsConfig:
    """``[kernels] use = "auto"``: an installed plugin's kernels for the run's device, otherwise ``torch``."""


@attrs.define(frozen=True, kw_only=True)
class TorchKernelsConfig:
    """``[kernels] use = "torch"``: plain PyTorch."""


@attrs.define(frozen=True, kw_only=True)
class RecomputeConfig:
    """``[[parallel]] use = "recompute"``: activation checkpointing."""

    granularity: Literal["full", "selective"] = "full"
    """What is recomputed in backward. `full`: all of a layer, which stores only its input, for a third more
    computation. `selective`: all except matrix products and attention, whose results are stored: norms, RoPE,
    activation functions and casts, which take memory and little time."""
    every: int = attrs.field(default=1, validator=Range(1))
    """1: all layers of a stage; 2: every second one, for half of the savings and half of the time."""


def recompute_captured(recipe: Recipe, config: RecomputeConfig, layout: Layout) -> Iterator[NotCaptured]:
    """Compiled layers recompute inside their graph; eager ones save a random state on the host."""
    if recipe.run.compile is False:
        yield NotCaptured(
            "layers that are recomputed eagerly save the state of random numbers on the host",
            expected='run.compile = "auto"',
        )


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
    """Decay rates of the first and second moment."""
    eps: float = attrs.field(default=1e-8, validator=Range(1e-30, 1.0))
    """Added to the root of the second moment."""
    weight_decay: float = attrs.field(default=0.1, validator=Range(0.0, 1e3))
    """Decoupled decay of tensors with two or more dimensions; norms and biases are not decayed."""
    moment_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Dtype of both moments between steps. `float32` is as wide as the master weight, `bfloat16` half of it;
    `int8` is companded, with one scale per 32 elements of a row. Resume with the same."""
    ema_decay: float = attrs.field(default=0.0, validator=Range(0.0, 1.0, below=True))
    """Share that a step keeps of an average of the weights (EMA), such as 0.999; 0 keeps no average."""

    @weight_decay.validator
    def _leaves_weights(self, field: Any, value: float) -> None:
        _expect_decay_below_one(self.lr, value)


@attrs.define(frozen=True, kw_only=True)
class SGDConfig(OptimizerConfig):
    """``[optimizer] use = "sgd"``."""

    momentum: float = attrs.field(default=0.0, validator=Range(0.0, 1.0, below=True))
    """Momentum coefficient of the velocity; 0 keeps no state."""
    weight_decay: float = attrs.field(default=0.0, validator=Range(0.0, 1e3))
    """Factor of the weight added to the gradient of tensors with two or more dimensions."""
    ema_decay: float = attrs.field(default=0.0, validator=Range(0.0, 1.0, below=True))
    """Share that a step keeps of an average of the weights (EMA), such as 0.999; 0 keeps no average."""

    @weight_decay.validator
    def _leaves_weights(self, field: Any, value: float) -> None:
        _expect_decay_below_one(self.lr, value)


@attrs.define(frozen=True, kw_only=True)
class PrecisionConfig:
    """``[precision] use = "fp64" | "fp32" | "bf16"``: no keys."""


#: Maximum of a dynamic loss scale: beyond, the scaled loss itself would overflow.
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
    """Number of newest checkpoints to keep, in addition to the newest before the last finite validation
    loss."""


@attrs.define(frozen=True, kw_only=True)
class ConsoleConfig:
    """``[[monitor]] use = "console"``."""

    style: Literal["auto", "lines", "table"] = "auto"
    """`auto` is a panel on a terminal, and `lines` elsewhere or with `NO_COLOR`; `table` has a row for each
    step."""
    every: int = attrs.field(default=1, validator=Range(1))
    """Steps between lines or rows; the panel is updated with every report."""
    metrics: tuple[str, ...] = ()
    """Published metrics to show too, each a name or a pattern: `"gradients/norm/*"`. `nanotrain metrics`
    lists them."""


@attrs.define(frozen=True, kw_only=True)
class JsonlConfig:
    """``[[monitor]] use = "jsonl"``: no keys."""


@attrs.define(frozen=True, kw_only=True)
class SampleConfig:
    """``[[monitor]] use = "sample"``: text generated by the model, on rank 0."""

    prompt: str = "\n"
    """Text that the model continues."""
    tokens: int = attrs.field(default=200, validator=Range(1, 1_000_000))
    """Number of tokens to generate, fewer if one of them ends the document."""
    temperature: float = attrs.field(default=0.8, validator=Range(0.0, 100.0))
    """Sampling temperature; 0 always takes the likeliest token."""
    every: int = attrs.field(default=0, validator=Range(0))
    """Steps between samples; 0 writes one at the end."""


@attrs.define(frozen=True, kw_only=True)
class ReplicasConfig:
    """``[[monitor]] use = "replicas"``: compares every bit of the weights, and shows every rank's memory."""

    every: int = attrs.field(default=1, validator=Range(1))
    """Steps between comparisons; every checkpoint is compared before it is written. With `zero12` or master
    weights only 1 finds every bit flip: each update overwrites the copies."""


@attrs.define(frozen=True, kw_only=True)
class BitFlipsConfig:
    """``[[monitor]] use = "bit_flips"``: weights, masters and optimizer state compared across a step."""

    every: int = attrs.field(default=100, validator=Range(1))
    """Steps between comparisons. Each reads this rank's state twice, and finds what flips between the update
    of its step and the next update: 1 finds every flip."""


@attrs.define(frozen=True, kw_only=True)
class GuardConfig:
    """``[[monitor]] use = "guard"``: detects when training goes wrong, and rolls it back."""

    window: int = attrs.field(default=128, validator=Range(8, 1_000_000))
    """Number of recent good losses to compare with."""
    warmup: int = attrs.field(default=32, validator=Range(4))
    """Number of good losses before any loss counts as a spike."""
    threshold: float = attrs.field(default=8.0, validator=Range(0.1, 1e6))
    """A spike is this many robust standard deviations (1.4826 x MAD, at least 1% of the median) above the
    median of the window."""
    patience: int = attrs.field(default=3, validator=Range(1))
    """Consecutive bad steps before the run rolls back; fewer recover by themselves."""
    margin: int = attrs.field(default=1, validator=Range(0))
    """Steps before the first bad one whose updates are suspect too: a loss shows the previous update."""
    max_rollbacks: int = attrs.field(default=3, validator=Range(0))
    """Maximum number of rollbacks before the run is stopped."""


@attrs.define(frozen=True, kw_only=True)
class StragglersConfig:
    """``[[monitor]] use = "stragglers"``: finds ranks that make others wait, and slow links."""

    every: int = attrs.field(default=5, validator=Range(1))
    """Logged steps whose number is a multiple of this are compared."""
    links: int = attrs.field(default=50, validator=Range(0))
    """Links are compared in logged steps whose number is a multiple of this: a few small messages, for which
    ranks wait. 0: never."""
    ratio: float = attrs.field(default=2.0, validator=Range(1.0, 1e6))
    """A rank is slow in a phase that takes it this many times as long as the median rank; links likewise."""
    least: float = attrs.field(default=0.01, validator=Range(0.0, FOUR_MONTHS))
    """Seconds per step below which no rank is considered slow."""
    patience: int = attrs.field(default=3, validator=Range(1))
    """Consecutive comparisons that must find the same rank before it is named."""


@attrs.define(frozen=True, kw_only=True)
class TextConfig:
    """``[data] use = "text"``."""

    paths: tuple[str, ...] = path_field(default=())
    """Files and folders, relative to the recipe or absolute. None: the Python standard library's source."""
    suffixes: tuple[str, ...] = (".txt", ".md", ".py")
    """Suffixes of the files of a folder that are read."""
    tokenizer: str = path_field(default="bytes", words=("bytes",))
    """`bytes` (256 tokens), or the path of a Hugging Face `tokenizer.json`."""
    validation_fraction: float = attrs.field(default=0.05, validator=Range(0.0, 1.0, below=True))
    """Fraction of the sequences held out, evenly spaced over the text."""
    piece_length: int = attrs.field(default=0, validator=Range(0, LARGEST_SIZE))
    """Length in tokens of the pieces of text that are held out as a whole. 0: the longest sequence of the
    recipe and its phases. A run that will be resumed with longer sequences needs their length from its
    beginning."""
    mask_documents: bool = False
    """Whether tokens attend only to tokens of their own document, where documents share a sequence."""


def masks_documents(config: Any) -> tuple[str, ...]:
    """Return what data with that config requires of a model: see ``Component.requires_for``."""
    return ("document_masks",) if config.mask_documents else ()


@attrs.define(frozen=True, kw_only=True)
class SyntheticConfig:
    """``[data] use = "synthetic"``: a random Markov chain, learnable down to its entropy."""

    vocab: int = attrs.field(validator=Range(2, 2**20))
    """Number of tokens."""
    branching: int = attrs.field(default=4, validator=Range(1, LARGEST_SIZE))
    """Number of possible successors of each token, at most `vocab`."""
    sequences: int = attrs.field(default=4096, validator=Range(1, LARGEST_SIZE))
    """Number of sequences in one epoch of training data."""
    validation_sequences: int = attrs.field(default=256, validator=Range(0, LARGEST_SIZE))
    """Number of held-out sequences."""

    @branching.validator
    def _fits(self, attribute: attrs.Attribute[int], value: int) -> None:
        if value > self.vocab:
            raise ValueError(f"{value} different tokens cannot follow each of {self.vocab}")
        if value * self.vocab > LARGEST_SIZE:
            raise ValueError(f"vocab x branching = {value * self.vocab:,}; expected at most {LARGEST_SIZE:,}")


def survey_synthetic(config: SyntheticConfig, length: int, longest: int = 0) -> Survey:
    """Return the survey, for any length."""
    return Survey(vocab=config.vocab, train=config.sequences, validation=config.validation_sequences)
