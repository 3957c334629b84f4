"""What the object behind each kind of component must offer.

``Component.factory`` is called with the component's config and returns one of these. Protocols are
structural: a plugin need not inherit from anything here, except that :class:`Monitor` is a base
class with empty methods, so that a monitor writes only the events it wants.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import attrs
import torch
from torch import nn

from nanotrain_core.actions import Action, Costs, Part
from nanotrain_core.batch import Batch, Shard
from nanotrain_core.boxes import boxes
from nanotrain_core.layout import Layout
from nanotrain_core.mesh import Mesh
from nanotrain_core.placement import Piece, PlacedParameter, Placement, Placements, Shape
from nanotrain_core.progress import Progress
from nanotrain_core.stop import Rollback

# --- topology ---------------------------------------------------------------------------------


class Topology(Protocol):
    """Lays out the ranks. The factory's module must not import torch: every command uses it."""

    def layout(self, world_size: int) -> Layout:
        """Return the layout of ``world_size`` ranks.

        Raises:
            ValueError: the degrees do not fit; the text says which and what would.
        """
        ...


# --- model ------------------------------------------------------------------------------------


@attrs.define(frozen=True, eq=False)
class PartOutput:
    """What one part of a model computes from one microbatch."""

    value: torch.Tensor | None
    """Hidden states [B, S, D] for the next part. From the last part: logits [B, S, V] when the
    batch has no targets, else None."""
    losses: Mapping[str, torch.Tensor] = attrs.field(factory=dict)
    """Scalar *sums* of loss terms, by name. The engine divides each by its global count."""


@attrs.define(frozen=True)
class Initializer:
    """How a parameter starts. ``normal`` has mean 0 and standard deviation ``value``."""

    kind: Literal["normal", "constant"]
    value: float


class ModelPart(Protocol):
    """An ``nn.Module`` built on ``meta``, parameters under their global names, roles tagged."""

    def __call__(self, inputs: torch.Tensor, batch: Batch) -> PartOutput:
        """``inputs`` is tokens [B, S] for the part with the embedding, else hidden states [B, S, D]."""
        ...

    def initializer(self, name: str) -> Initializer:
        """Return how the parameter of that global name starts."""
        ...


class Model(Protocol):
    """A model's dimensions and its parts. Knows nothing of parallelism."""

    layers: int
    vocab_size: int
    max_length: int | None
    """Longest sequence, None if any length works."""
    loss_weights: Mapping[str, float]
    """Weight of each loss term in the training loss. ``"lm"`` is the next-token loss."""

    def build(self, part: Part) -> nn.Module:
        """Return a :class:`ModelPart`. Parameters need no values: they are initialised by name."""
        ...

    def loss_counts(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return what each loss term is averaged over in ``batch`` (``lm``: its target tokens).

        Counts are summed over all microbatches of all ranks, then divide the sums before backward.
        """
        ...

    def flops(self, length: int) -> Costs:
        """Return model FLOPs of forward and backward for one token of a sequence of ``length``, by piece.

        Pipelines are balanced by them.
        """
        ...


# --- parallel ---------------------------------------------------------------------------------


class Parallel(Protocol):
    """Transforms a model part while it is still on ``meta``."""

    def apply(self, part: nn.Module, placements: Placements, mesh: Mesh) -> nn.Module:
        """Return the transformed part (it may be the same object) and update ``placements`` to match."""
        ...


@runtime_checkable
class GradientSync(Protocol):
    """Owns every parameter's gradient between backward and the optimizer.

    Offered by the one component of a run that provides ``gradient_sync``; without one the core's
    :class:`~nanotrain_core.gradients.LocalGradients` serves, on a layout that needs no sums.
    """

    def attach(self, parameters: Sequence[PlacedParameter], mesh: Mesh, dtype: torch.dtype | None) -> None:
        """Take over the gradients of ``parameters``. Accumulate in ``dtype`` (None: each parameter's own)."""
        ...

    def last_microbatch(self, parameters: Collection[nn.Parameter]) -> None:
        """Announce that the next gradient of each of ``parameters`` is the last one of this step.

        The parameters of one pipeline stage, in the same order on all ranks that hold the stage.
        """
        ...

    def microbatch(self, parameters: Collection[nn.Parameter]) -> None:
        """Announce that one more microbatch has all its gradients of ``parameters``, one pipeline stage's.

        Called for every microbatch, in the same order on all ranks that hold the stage.
        """
        ...

    def complete(self, parameters: Collection[nn.Parameter]) -> None:
        """Announce that no more gradients of ``parameters`` come, also of those that never got any."""
        ...

    def finish(self) -> None:
        """Return once every gradient is the complete sum over microbatches and ranks."""
        ...

    def pieces(self) -> Sequence[Piece]:
        """Return what this rank gets complete gradients of, and is to update: fixed from :meth:`attach` on.

        Whole parameters, or a range of each where the ranks that hold a block share it out.
        """
        ...

    def gradient_of(self, piece: Piece) -> torch.Tensor:
        """Return a gradient in the shape of ``piece.weight``; zeros if no rank's backward reached it.

        The optimizer may scale it in place.
        """
        ...

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the gradient of a whole parameter, for a script's own optimizer.

        Raises:
            NanotrainError: this rank does not get all of it.
        """
        ...

    def zero(self) -> None:
        """Forget all gradients."""
        ...


# --- precision --------------------------------------------------------------------------------


class MasterWeight(Protocol):
    """The weight an optimizer updates, in whatever form a precision keeps it."""

    def load(self) -> torch.Tensor:
        """Return the weight in the optimizer's dtype, shaped as the parameter.

        May be the live storage. If it is decoded for this call, forget it after ``store``: kept, it would
        cost the memory that the format saves.
        """
        ...

    def store(self, value: torch.Tensor) -> None:
        """Keep ``value`` as the new weight and write it through to the model's parameter."""
        ...

    def state(self) -> Mapping[str, torch.Tensor]:
        """Return live tensors beyond the parameter itself that a checkpoint must hold, by name."""
        ...


@runtime_checkable
class ErrorFeedback(MasterWeight, Protocol):
    """A master that loses so much of what is stored that the optimizer must carry the loss in its momentum.

    After each ``store(value)`` the optimizer adds what ``error`` returns to its momentum, scaled so that the
    steps to come make up for it. One that cannot must refuse such a master in ``setup``.
    """

    def error(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value``, just stored, less what was kept of it."""
        ...


class LossScale(Protocol):
    """Multiplies the loss before backward so that small gradients survive a narrow dtype."""

    @property
    def value(self) -> float: ...

    def update(self, skipped: bool) -> None:
        """Learn whether the step was skipped."""
        ...

    def meta(self) -> dict[str, Any]: ...

    def load_meta(self, meta: Mapping[str, Any]) -> None: ...


class Precision(Protocol):
    """Dtypes of a run.

    It may also have, and the core then calls in this order:

    * ``seed(number)``, of the run, before anything else: one that rounds at random rounds alike in two runs.
    * ``settle(parts, mesh)``, once on every rank when all parts are converted. It may talk to other ranks,
      to learn whether a pattern of the recipe matches any module of the whole model.
    * ``describe()``: lines that say what each module got, the same on every rank. The console shows them.
    """

    parameter_dtype: torch.dtype
    """Of the model's parameters and activations."""
    gradient_dtype: torch.dtype | None
    """Of accumulated and reduced gradients; None keeps the parameter's."""
    loss_scale: LossScale

    def convert(self, part: nn.Module) -> nn.Module:
        """Return the part, still on ``meta``, with the dtypes and modules of this precision.

        Parameters keep their names and shapes. Their initial values, drawn in float32, are then
        rounded into the dtypes chosen here.
        """
        ...

    def master(self, weight: torch.Tensor, piece: Piece) -> MasterWeight:
        """Return the master of ``weight``: a parameter, or a live view of a range of one.

        It may round ``weight`` into its format at once: ranks that hold it do the same, or are sent it.

        Args:
            weight: initialised; the master's ``store`` writes through to it. The weight of ``piece``, or a
                copy of it on another device.
            piece: its name, and where it sits in the whole model. A range begins and ends at a multiple of
                :data:`~nanotrain_core.placement.RANGE` elements of its block, or at the block's end.
        """
        ...


# --- optimizer --------------------------------------------------------------------------------


@attrs.define(frozen=True, eq=False)
class Block:
    """A live tensor that a checkpoint saves and fills, and where it sits in the whole run."""

    name: str
    global_shape: Shape
    offset: Shape
    tensor: torch.Tensor

    @classmethod
    def of(cls, prefix: str, tensor: torch.Tensor, placement: Placement) -> Block:
        """Name a tensor after its parameter, ``exp_avg/layers.0.attn.q.weight``.

        It has the shape of the parameter's block, or it is a scalar that all blocks share.
        """
        name = f"{prefix}/{placement.name}" if prefix else placement.name
        if not tensor.shape:
            return cls(name, (), (), tensor)
        return cls(name, placement.global_shape, placement.offset, tensor)

    @classmethod
    def of_piece(cls, prefix: str, tensor: torch.Tensor, piece: Piece) -> Iterator[Block]:
        """Yield the blocks of a tensor shaped as ``piece.weight``: a flat range is a few boxes."""
        placement = piece.placement
        if piece.span is None or not tensor.shape:
            yield cls.of(prefix, tensor, placement)
            return
        name, first = f"{prefix}/{placement.name}" if prefix else placement.name, 0
        for offset, shape in boxes(placement.shape, *piece.span):
            view = tensor[first : first + prod(shape)].view(shape)
            first += prod(shape)
            at = tuple(a + b for a, b in zip(placement.offset, offset, strict=True))
            yield cls(name, placement.global_shape, at, view)


@attrs.define(frozen=True, eq=False)
class StepStats:
    """What one optimizer step measured. Tensors stay on the device until somebody reads them."""

    grad_norm: torch.Tensor
    """Global 2-norm before clipping, equal on every rank."""
    skipped: bool = False


class Optimizer(Protocol):
    """Updates weights from summed gradients. Its config is an ``OptimizerConfig``."""

    inner: torch.optim.Optimizer
    """Holds ``param_groups`` for learning-rate schedulers."""

    def setup(
        self,
        parameters: Sequence[PlacedParameter],
        precision: Precision,
        gradients: GradientSync,
        mesh: Mesh,
    ) -> None:
        """Make the masters and allocate all state, so that a checkpoint can fill it before step 1."""
        ...

    def step(self, *, loss_scale: float = 1.0) -> StepStats:
        """Divide gradients by ``loss_scale``, clip them to the config's global norm, update.

        A step whose global norm is not finite changes nothing, on all ranks alike, and says so.
        """
        ...

    # An optimizer may also have ``wait(parameters)``: its step then returns while updated weights travel,
    # and the core waits for those of a module before that is called: see nanotrain_core.fences.

    def blocks(self) -> Iterable[Block]:
        """Yield every state tensor, masters included."""
        ...

    def meta(self) -> dict[str, Any]:
        """Return the rest of the state, as JSON."""
        ...

    def load_meta(self, meta: Mapping[str, Any]) -> None: ...


# --- schedule ---------------------------------------------------------------------------------


class Schedule(Protocol):
    """A pipeline schedule as data. Torch-free."""

    def parts(self, costs: Costs, pp: int) -> tuple[Part, ...]:
        """Return the stages in the order of the model: consecutive, and with all of its layers.

        Each names the pipeline rank that holds it; a rank with several holds virtual stages. Before a run
        only the number of layers is known, and ``costs`` are alike: whether there are stages must depend
        on nothing else.

        Raises:
            ValueError: so many layers cannot be cut like that; the text says what can.
        """
        ...

    def actions(self, pp: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
        """Return the ordered actions of every pipeline rank for one step.

        Raises:
            ValueError: the schedule does not exist for so many microbatches.
        """
        ...


# --- checkpoint -------------------------------------------------------------------------------


@attrs.define(frozen=True, eq=False)
class TrainState:
    """All that a run must remember: placed tensors, JSON, and each rank's own streams."""

    blocks: Sequence[Block]
    """Weights and optimizer state. Names are unique across the run; replicas are equal."""
    meta: Mapping[str, Any]
    """JSON, the same on every rank: step, scheduler, loss scale, data position, recipe."""
    rank_tensors: Mapping[str, torch.Tensor]
    """This rank's random-number streams, uint8, restored only on the same world size."""
    accept: Callable[[Mapping[str, Any]], None] = lambda meta: None
    """For a load: raises, on all ranks alike, if the run cannot go on from the saved ``meta``."""


class Checkpoint(Protocol):
    """Saves and restores a run in one folder. Every method but the last two is collective.

    A save has two halves, so that files can be written while training goes on. :meth:`save` returns as
    soon as ``state`` may change again; :meth:`advance` tells, at a later step boundary, that it is
    complete and in place. One that writes at once tells in the first :meth:`advance` after it.
    """

    def open(self, folder: Path, mesh: Mesh) -> None:
        """Use ``folder``, made on the first save, and clear away what a killed save left there."""
        ...

    def due(self, step: int) -> bool:
        """Say whether to save after ``step`` steps are done, the same on every rank.

        The final save, and one when the run is asked to stop, are always made.
        """
        ...

    def save(self, step: int, state: TrainState) -> None:
        """Begin a checkpoint that will appear complete or not at all. None may be on its way.

        Raises:
            CheckpointError: on every rank: nothing was begun, and a later save may succeed.
        """
        ...

    def advance(self, *, wait: bool) -> Sequence[CheckpointReport]:
        """Return what became complete since the last call. With ``wait`` that is all that was begun.

        Every rank calls it after the same steps. Ranks talk only while a save is on its way.

        Raises:
            CheckpointError: on every rank: the save failed on one, and nothing of it is left.
        """
        ...

    def load(self, which: str, state: TrainState) -> TrainState | None:
        """Fill ``state.blocks`` in place and return what was saved, or None if there is nothing.

        What is whole and fits is shown to ``state.accept`` before anything live is touched, or moved.
        Later steps in the run's own folder are of a branch that the run leaves, by a resume or a rollback,
        and so are all steps there if what is loaded is elsewhere: move them aside, so that :meth:`steps`
        does not name them and no later ``"latest"`` finds them.

        Args:
            state: what to fill. Blocks may be cut in any other way than they were saved.
            which: ``"latest"``: the newest that is whole, damaged ones being set aside with a
                warning; or a step number, or a path, and then exactly this one.

        Raises:
            CheckpointError: on every rank: it is damaged or does not fit; nothing live was touched.
        """
        ...

    def steps(self) -> Sequence[int]:
        """Return the steps with a complete checkpoint, oldest first."""
        ...

    def verify(self, step: int) -> Sequence[str]:
        """Return what is wrong with a checkpoint: empty if it would load."""
        ...


class WeightReader(Protocol):
    """The weights of one saved model, opened for reading a block at a time."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Of every parameter, by global name, and of nothing else: no optimizer state."""
        ...

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """As stored, by global name."""
        ...

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Return one block, on the CPU. Every slice has both ends."""
        ...

    def damage(self) -> Sequence[str]:
        """Read everything if need be, and return what is wrong: empty if it is whole."""
        ...


@attrs.define(frozen=True, eq=False)
class SavedWeights:
    """What the callable of ``Component.weights`` returns for a path of its format."""

    model: Mapping[str, Any]
    """The table ``[model]`` they belong to, with ``use``."""
    reader: WeightReader


# --- data -------------------------------------------------------------------------------------


class Data(Protocol):
    """Batches that are the same for every layout, with a position that can be saved."""

    vocab_size: int
    bytes_per_token: float | None
    """Mean over the validation split, to report bits per byte; None when tokens are not text."""

    def open(self, *, length: int, seed: int) -> None:
        """Prepare sequences of ``length`` tokens.

        Raises:
            DataError: there is no data, or less than one sequence of it.
        """
        ...

    def train_batch(self, sequences: int, shard: Shard) -> Batch:
        """Advance by one global batch of ``sequences`` and return this shard's rows of it."""
        ...

    def validation_batch(self, index: int, sequences: int, shard: Shard) -> Batch | None:
        """Return this shard's rows of the ``index``-th validation batch; None after the last.

        Batches come in one fixed order. The last is padded with rows of ignored targets.
        """
        ...

    def describe(self) -> str:
        """Return what the data is, in one line: its size, and what a model can learn from it if known."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def meta(self) -> dict[str, Any]:
        """Return the position and a fingerprint of the data, as JSON."""
        ...

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Go back to a position.

        Raises:
            DataError: the fingerprint is of other data.
        """
        ...


# --- monitor ----------------------------------------------------------------------------------


@attrs.define(frozen=True, eq=False)
class RunInfo:
    """What a monitor may know about the run it watches. Read-only by agreement."""

    name: str
    folder: Path | None
    steps: int
    first_step: int
    """Steps already done when this run began: above 0 after a resume."""
    rank: int
    world_size: int
    device: torch.device
    parameters: int
    """Of the whole model."""
    tokens_per_step: int
    flops_per_token: float
    recipe: Any
    """The frozen recipe, or the config of a script."""
    optimizer_bytes: int
    """Of optimizer state and masters on this rank."""
    mesh: Mesh
    parts: Sequence[nn.Module]
    """This rank's model parts."""
    placed: Sequence[PlacedParameter]
    data: Any
    logits: Callable[[torch.Tensor], torch.Tensor]
    """Collective: the model's logits [B, S, V] for tokens [B, S], on every rank of any layout."""
    progress: Progress
    """Where this rank is, and how long its phases took."""
    described: Sequence[str] = ()
    """Lines about stages, and of the precision about its modules, the same on every rank."""


@attrs.define(frozen=True)
class StepReport:
    """One logged step. Every number is global and equal on every rank."""

    step: int
    """Steps done, this one included: the first is 1."""
    loss: float
    """The training loss: weighted sum of the terms, each a mean over its global count."""
    losses: Mapping[str, float]
    """Each term's unweighted mean."""
    grad_norm: float
    lr: float
    tokens: int
    """Seen since the beginning of the run, resumed parts included."""
    tokens_per_second: float
    """Since the previous report, over all ranks."""
    seconds: float
    """Of one step, mean since the previous report."""
    loss_scale: float = 1.0
    skipped: bool = False
    expert_load: float | None = None
    """Tokens of the busiest expert over the mean, in the worst layer; None without experts."""
    bubble: float | None = None
    """Share of the schedule's time that ranks waited for other stages, mean over ranks; None where no host
    waits: without a pipeline, and on CUDA."""


@attrs.define(frozen=True)
class EvaluationReport:
    """One pass over the validation batches."""

    step: int
    loss: float
    """Mean next-token loss, in nats."""
    bits_per_byte: float | None
    """The same loss per byte of text, in bits, where tokens are text."""
    tokens: int
    """Predicted tokens it is the mean of."""


@attrs.define(frozen=True)
class CheckpointReport:
    """A checkpoint that is complete and in place."""

    step: int
    path: Path
    seconds: float
    """From the beginning of the save until it was in place."""
    blocked: float = 0.0
    """Seconds of these that training waited."""


@attrs.define(frozen=True)
class FailedSaveReport:
    """A checkpoint that could not be saved: nothing of it is left, and no older one is harmed."""

    step: int
    problem: str
    in_a_row: int
    """Saves that have failed since one succeeded, this one included: the third ends the run."""


@attrs.define(frozen=True)
class EndReport:
    """How a run ended."""

    step: int
    reason: Literal["done", "stopped", "preempted", "interrupted", "failed"]
    tokens: int


@attrs.define(frozen=True)
class RollbackReport:
    """A run went back to a checkpoint."""

    step: int
    """Where it had come to."""
    onset: int
    """The first step that was suspected."""
    restored: int
    """The step it goes on from."""
    skipped: tuple[int, int]
    """Sequences that will not be seen again: first, and one behind the last, counted from the run's start."""
    count: int
    """Rollbacks of this run so far, this one and those before a resume included."""
    reason: str


#: What a monitor may return from ``on_step`` or ``on_evaluation``, on any rank: all ranks learn of it.
Request = Literal["stop"] | Rollback


class Monitor:
    """Reacts to the events of a run, on every rank. Must not draw random numbers or change tensors.

    An exception inside a monitor is logged and the run goes on, unless ``[run] strict_monitors`` is
    set or it is a :class:`~nanotrain_core.errors.NanotrainError`, which stops the run with its text.
    """

    every_step: bool = False
    """Whether ``on_step`` is called after every step, also of a run that logs only some. Each report costs
    one small all-reduce."""

    reads_weights: bool = True
    """Whether it may look at parameters: before it is told of an event, weights still on their way are waited
    for. One that does not lets them travel on; ``RunInfo.logits`` waits by itself."""

    def on_start(self, run: RunInfo) -> None: ...

    def on_step(self, report: StepReport) -> Request | None: ...

    def on_evaluation(self, report: EvaluationReport) -> Request | None: ...

    def on_checkpoint(self, report: CheckpointReport) -> None: ...

    def on_save_failed(self, report: FailedSaveReport) -> None: ...

    def on_rollback(self, report: RollbackReport) -> None: ...

    def on_end(self, report: EndReport) -> None: ...

    def meta(self) -> dict[str, Any]:
        """Return what a checkpoint must remember of this monitor, as JSON, the same on every rank."""
        return {}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Take back what :meth:`meta` returned; not called for a checkpoint that knows nothing of it."""
