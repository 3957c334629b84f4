"""The structure of a resolved recipe: frozen attrs classes, one per section of the file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal

import attrs

from nanotrain_core.component import KINDS, LISTED_KINDS
from nanotrain_core.errors import did_you_mean
from nanotrain_core.recipe.frozen import FrozenMapping
from nanotrain_core.recipe.phase import CHANGEABLE, CONSTANT, Phase
from nanotrain_core.recipe.range_validator import Range


def path_field(*, words: tuple[str, ...] = (), **options: Any) -> Any:
    """Return an ``attrs.field`` that holds a path, or a tuple of paths, as ``str``.

    A relative path is relative to the file that contains it, or to the working directory when it comes
    from ``--set``. It is made absolute when the recipe is loaded.

    Args:
        words: values that are not paths and stay unchanged.
        options: passed to ``attrs.field``.
    """
    metadata = {"nanotrain": "path", "words": words}
    return attrs.field(metadata=metadata, validator=_fits_a_file_system, **options)


def _fits_a_file_system(instance: Any, field: Any, value: Any) -> None:
    for path in value if isinstance(value, tuple) else (value or "",):
        if len(os.fsencode(path)) > 4095 or any(len(os.fsencode(part)) > 255 for part in path.split("/")):
            raise ValueError(f"{path[:60]}...: too long for a file's name, of {len(path)} characters")


#: Seconds: the maximum of all waiting times.
FOUR_MONTHS = 1e7

#: Marks a field of a model's config that affects training, but not what given weights compute:
#: ``attrs.field(metadata={TRAINING_ONLY: True})``. A run may start from weights of a model that differs.
TRAINING_ONLY = "nanotrain_training"
#: Marks a field of a config, other than a model's, on which it depends what saved tensors compute, but not
#: their names, shapes or dtypes, such as the scale of a wrapper's adapters: a run resumes with the same one.
SAME_ON_RESUME = "nanotrain_computes"


#: Backends of ``torch.compile`` included in torch. Others are entry points, through which torch finds them.
COMPILE_BACKENDS = ("inductor", "aot_eager", "aot_eager_decomp_partition", "cudagraphs", "eager")


def _compile_backend(instance: Any, field: Any, value: str) -> None:
    """Reject a name that torch would not know, without importing torch."""
    if value in COMPILE_BACKENDS:  # a search of all entry points takes half of the time to read a recipe
        return
    others = (point.name for point in entry_points(group="torch_dynamo_backends"))
    known = sorted({*COMPILE_BACKENDS, *others})
    if value not in known:
        near = did_you_mean(value, known)
        raise ValueError(f"torch.compile has no backend '{value}'{near}; expected one of {', '.join(known)}")


def _folder_name(instance: Any, field: Any, value: str) -> None:
    """Reject a name that would leave the folder ``runs``, or that no file system accepts."""
    plain = value.isprintable() and value == value.strip() and len(os.fsencode(value)) <= 200
    if not plain or not all(part and part[0] not in ".-" for part in value.split("/")):
        raise ValueError(
            f"expected the name of a folder in runs, up to 200 characters, no part of it first '.' or '-', "
            f"got {value[:60]!r}, of {len(value)} characters; run.folder may be any folder"
        )


@attrs.define(frozen=True)
class Selection:
    """A component selected by name, with its table as that component's config class."""

    kind: str
    """Of the component: ``optimizer``."""
    use: str
    """Its name: ``adamw``."""
    config: Any
    """An instance of its config class."""
    unsupported: frozenset[str] = frozenset()
    """The abilities that its component declares not to have with this config: a check of another component
    that relies on one, such as sequence parallelism on the model's layers, must refuse the recipe."""
    mesh_dims: frozenset[str] = attrs.field(default=frozenset(), eq=False)
    """The mesh dimensions that its component handles, for checks of other wrappers."""


@attrs.define(frozen=True, kw_only=True)
class RunConfig:
    """``[run]``: what is run, for how long, and where its results are written."""

    NOT_KEYS: ClassVar[Mapping[str, str]] = {
        "max_steps": "it is steps",
        "epochs": "a run has a number of steps, with batch.sequences each",
        "tokens": "a run has a number of steps, or phases with until_tokens",
        "world_size": "it is ranks",
        "eval_every": "it is evaluation.every",
        "save_every": "it is checkpoint.every",
    }

    name: str = attrs.field(default="run", validator=_folder_name)
    """Name of the run folder, ``runs/<name>``."""
    steps: int = attrs.field(validator=Range(1))
    """Total optimizer steps. May be omitted where phases say how many tokens they take."""
    seed: int = attrs.field(default=1234, validator=Range(-(2**62), 2**62))
    """Seed of the initial weights and of the order of the data."""
    ranks: int = attrs.field(default=1, validator=Range(1, 2**20))
    """World size: `--nproc` times `--nnodes` overrides it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` uses GPUs if there are any."""
    share_device: bool = attrs.field(default=False)
    """For tests: all ranks of a host compute on its first GPU. They communicate through host memory
    and gloo; layers stay eager."""
    weights: str | None = path_field(default=None)
    """Initial weights instead of random ones: a Hugging Face folder, what `nanotrain convert` wrote,
    a checkpoint or a run folder. `--weights` overrides it; a resumed run uses its checkpoint's."""
    folder: str | None = attrs.field(default=None, validator=_fits_a_file_system)
    """Run folder. Unset: `runs/<name>`, then `runs/<name>-2` and so on, so that no run is overwritten."""
    log_every: int = attrs.field(default=1, validator=Range(1))
    """Steps between reports to monitors. Each report synchronizes the host with the device."""
    timeout: float = attrs.field(default=300.0, validator=Range(1.0, FOUR_MONTHS))
    """Seconds a collective may take before the run fails; five times as long on GPUs with compiled layers,
    which one pipeline stage after the other compiles in the first step."""
    hang_timeout: float = attrs.field(default=240.0, validator=Range(0.0, FOUR_MONTHS))
    """Seconds without progress after which ranks are named, their stacks saved, and all of them ended; 0
    disables it. Five times as long for the start, the first step and a checkpoint. Less than `timeout`, or a
    collective fails first."""
    grace: float = attrs.field(default=120.0, validator=Range(1.0, FOUR_MONTHS))
    """Seconds for a last step and checkpoint after Ctrl-C or SIGTERM; ranks that take longer are ended. Less
    than the cluster waits before it kills."""
    max_restarts: int = attrs.field(default=0, validator=Range(0))
    """How often all ranks are restarted after a failure; `--max-restarts` overrides it."""
    in_process_restart: bool = attrs.field(default=False)
    """After a failure, only ranks that are gone get new processes; the others begin again in theirs."""
    strict_monitors: bool = False
    """Let an exception inside a monitor stop the run."""
    deterministic: bool = False
    """Use only deterministic kernels of torch."""
    compile: Literal["auto", True, False] = "auto"
    """Compile the forward and backward pass of each layer, and the loss, with `torch.compile`; `auto` does so
    on GPUs. See docs/performance.md for what stays eager."""
    compile_backend: str = attrs.field(default="inductor", validator=_compile_backend)
    """Compiler backend, by a name that torch knows. `aot_eager` calls the kernels of an eager run."""
    cuda_graphs: bool = False
    """Capture the forward and backward pass of a microbatch in a CUDA graph and replay it, where the host
    launches kernels more slowly than the GPU runs them. See docs/performance.md for what is refused."""

    @hang_timeout.validator
    def _is_off_or_a_second(self, field: Any, value: float) -> None:
        if 0 < value < 1:
            raise ValueError(f"expected 0, which disables it, or a number from 1, got {value:g}")

    @in_process_restart.validator
    def _ends_hangs(self, field: Any, value: bool) -> None:
        if value and not self.hang_timeout:
            raise ValueError("a collective that hangs is ended by hang_timeout alone; set it above 0")

    @share_device.validator
    def _is_a_gpu(self, field: Any, value: bool) -> None:
        if value and self.device == "cpu":
            raise ValueError(
                'ranks share a GPU, and run.device = "cpu"; leave it out, or set device = "cuda"'
            )


@attrs.define(frozen=True, kw_only=True)
class BatchConfig:
    """``[batch]``: the global batch of one optimizer step, the same for every layout."""

    NOT_KEYS: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("size", "batch_size", "global_batch_size"), "it is sequences, a step's over all ranks"
        ),
        **dict.fromkeys(("micro_batch_size", "per_device_train_batch_size"), "it is microbatch"),
        **dict.fromkeys(
            ("seq_len", "seq_length", "sequence_length", "context_length"), "it is length, in tokens"
        ),
        "gradient_accumulation_steps": "each rank takes its share in as many microbatches as it needs",
    }

    sequences: int = attrs.field(validator=Range(1), metadata={CHANGEABLE: True})
    """Sequences per optimizer step over the whole run."""
    microbatch: int = attrs.field(validator=Range(1), metadata={CHANGEABLE: True, CONSTANT: True})
    """Maximum sequences that one rank passes through the model at once: the last microbatch of a step may be
    smaller."""
    length: int = attrs.field(validator=Range(1), metadata={CHANGEABLE: True, CONSTANT: True})
    """Tokens per sequence."""

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step over the whole run."""
        return self.sequences * self.length

    def microbatches(self, shards: int) -> int:
        """Return how many microbatches each of ``shards`` data-parallel ranks takes in a step.

        Ranks' sequence counts differ by one where ``shards`` does not divide them; the number of microbatches
        never does, because each has collectives.
        """
        return -(-self.sequences // shards // self.microbatch)


@attrs.define(frozen=True, kw_only=True)
class EvaluationConfig:
    """``[evaluation]``: loss on held-out data."""

    every: int = attrs.field(default=0, validator=Range(0))
    """Steps between evaluations; 0 evaluates only at the end."""
    sequences: int = attrs.field(default=64, validator=Range(0))
    """Validation sequences to use, rounded up to whole batches; 0 turns evaluation off."""


@attrs.define(frozen=True, kw_only=True)
class LRScheduleConfig:
    """``lr_schedule`` of an optimizer: the learning rate over the steps of the run."""

    NOT_KEYS: ClassVar[Mapping[str, str]] = {
        "min_lr": "it is final_ratio, a fraction of lr",
        **dict.fromkeys(("type", "name"), "it is use"),
    }

    use: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape after warm-up. `wsd` stays constant and then decays linearly over `decay_steps`."""
    warmup_steps: int = attrs.field(default=0, validator=Range(0))
    """Steps of linear rise to the full rate; the first step already has a rate above 0."""
    decay_steps: int | None = attrs.field(default=None, validator=Range(1))
    """Steps of decay, at the end of the run. Unset: all after warm-up; for `wsd` a tenth of the run, at least
    2."""
    final_ratio: float = attrs.field(default=0.0, validator=Range(0.0, 1e3))
    """Final rate of the decay, as a fraction of `lr`: it would be reached one step after the run."""


@attrs.define(frozen=True, kw_only=True)
class OptimizerConfig:
    """The common keys of every optimizer's table; an optimizer's config class derives from this."""

    NOT_KEYS: ClassVar[Mapping[str, str]] = {
        "learning_rate": "it is lr",
        "wd": "it is weight_decay",
        **dict.fromkeys(("max_grad_norm", "grad_clip", "gradient_clipping"), "it is clip_norm"),
        **dict.fromkeys(("warmup", "warmup_steps"), "it is lr_schedule.warmup_steps"),
        **dict.fromkeys(("scheduler", "lr_scheduler"), "it is lr_schedule"),
        **dict.fromkeys(("beta1", "beta2"), "it is betas = [beta1, beta2]"),
        "min_lr": "it is lr_schedule.final_ratio, a fraction of lr",
    }

    lr: float = attrs.field(default=1e-3, validator=Range(0.0, 1e3, above=True), metadata={CHANGEABLE: True})
    """Peak learning rate."""
    clip_norm: float = attrs.field(default=1.0, validator=Range(0.0, 1e12))
    """Maximum global gradient norm; larger gradients are scaled down to it. 0 never clips."""
    lr_schedule: LRScheduleConfig = attrs.field(factory=LRScheduleConfig)
    """Learning rate over the steps of the run."""

    weight_decay = 0.0
    """No key, unless an optimizer's table has it: decay of matrices, for ``MasterOptimizer``."""
    ema_decay = 0.0
    """Likewise: share of the averaged weights that each step keeps; 0 keeps no average."""


def _frozen(versions: Mapping[str, str]) -> Mapping[str, str]:
    return FrozenMapping(versions)


@attrs.define(frozen=True, kw_only=True)
class Recipe:
    """A whole resolved recipe. Immutable once built."""

    run: RunConfig
    batch: BatchConfig
    evaluation: EvaluationConfig = attrs.field(factory=EvaluationConfig)
    topology: Selection
    kernels: Selection
    model: Selection
    parallel: tuple[Selection, ...] = ()
    schedule: Selection
    optimizer: Selection
    precision: Selection
    checkpoint: Selection
    monitor: tuple[Selection, ...] = ()
    data: Selection
    phase: tuple[Phase, ...] = ()
    """What changes after how many tokens."""
    requires: tuple[str, ...] = ()
    """Distributions the recipe needs, as version specifiers: `nanotrain-ddp>=0.1`."""
    versions: Mapping[str, str] = attrs.field(factory=FrozenMapping, converter=_frozen)
    """Versions of core, torch and plugins when it was resolved; written to the run folder."""

    def selections(self) -> tuple[Selection, ...]:
        """Return every selected component: the topology first, the monitors last."""
        found: list[Selection] = []
        for kind in KINDS:
            chosen = getattr(self, kind)
            found += chosen if kind in LISTED_KINDS else [chosen]
        return tuple(found)


#: The sections whose keys are the core's own; the others are those of :data:`KINDS`, and phases.
CORE_SECTIONS: Mapping[str, type] = {"run": RunConfig, "batch": BatchConfig, "evaluation": EvaluationConfig}

#: The defaults for sections that a recipe omits. ``model`` has no default.
DEFAULT_USE: dict[str, str | tuple[str, ...]] = {
    "topology": "grid",
    "kernels": "auto",
    "parallel": (),
    "schedule": "accumulate",
    "optimizer": "adamw",
    "precision": "fp32",
    "checkpoint": "simple",
    "monitor": ("console", "jsonl"),
    "data": "text",
}
