"""What a monitor hears of, and may say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
from torch import nn

from nanotrain_core.contracts.checkpoint import TrainState
from nanotrain_core.contracts.reports import (
    CheckpointReport,
    EndReport,
    EvaluationReport,
    FailedSaveReport,
    RollbackReport,
    StepReport,
)
from nanotrain_core.contracts.update import UpdateReport
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import PlacedParameter, Placement
from nanotrain_core.metrics.declared import Metric
from nanotrain_core.metrics.publish import Metrics
from nanotrain_core.metrics.report import MetricsReport
from nanotrain_core.pipeline.actions import Action
from nanotrain_core.run.stop import Rollback
from nanotrain_core.watch.progress import Progress


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
    """Of the first step; phases of a recipe may change it."""
    length: int | None
    """Tokens of each sequence in the first step, which phases may change: ``StepReport.length`` has that of
    every step. None of a script."""
    flops_per_token: float
    """Of the model in the first step: ``StepReport.flops_per_token`` has that of every step."""
    recipe: Any
    """The frozen recipe, or the config of a script."""
    optimizer_bytes: int
    """Of optimizer state and masters on this rank when the run began, wherever they are held. In a script
    they may appear with the first update."""
    optimizer_device_bytes: Callable[[], int]
    """Bytes of optimizer state and masters that :attr:`device` holds now: what is offloaded is left out."""
    mesh: Mesh
    parts: Sequence[nn.Module]
    """This rank's model parts."""
    placed: Sequence[PlacedParameter]
    data: Any
    logits: Callable[[torch.Tensor], torch.Tensor]
    """Collective: the model's logits [B, S, V] for tokens [B, S], on every rank of any layout."""
    progress: Progress
    """Where this rank is, and how long its phases took."""
    weights: Callable[[], Iterator[tuple[torch.Tensor, Placement]]]
    """Yields the weights that this rank holds, as numbers, each with its placement: for
    ``metrics.placed``."""
    optimizer_state: Callable[..., Iterator[tuple[torch.Tensor, Placement]]]
    """Yields this rank's optimizer state of these names, as ``exp_avg``, likewise; nothing of one that does
    not exist, or that is not held in floating-point numbers."""
    tap: Callable[..., Sequence[str]]
    """``tap(look, ["layers.*.attn"])`` has ``look(name, output)`` called with what modules return in logged
    steps: see :meth:`nanotrain_core.run.taps.Taps.add`. In ``on_start``, on all ranks."""
    tap_calls: Callable[..., Sequence[str]]
    """``tap_calls("attention", look, ["layers.*"])`` has ``look(name, *args)`` called with what layers call a
    function of their table with: see :meth:`nanotrain_core.run.taps.Taps.add_calls`. In ``on_start``, on all
    ranks."""
    together: Callable[[], None]
    """Collective: return when this monitor is here on all ranks. If it fails on one rank meanwhile, its event
    ends on all of them. The methods of ``mesh``, ``logits`` and ``UpdateReport.norms`` begin with it; call
    it before a collective in a process group."""
    metrics: Metrics
    """What this monitor publishes metrics with."""
    schedule: Sequence[Sequence[Action]] = ()
    """What every pipeline rank does in a step, in order: in the first one, if phases change the batch. Of a
    script empty."""
    pipeline_share: float = 1.0
    """FLOPs of this rank's pipeline stages over the mean of pipeline ranks."""
    declared: Sequence[Metric] = ()
    """All metrics that the core and this run's monitors declare."""
    described: Sequence[str] = ()
    """Lines about stages, and of the precision about its modules, the same on every rank."""


@attrs.define(frozen=True, eq=False)
class Restore:
    """A run that is about to look for its checkpoints. The same on every rank, but for ``mesh``."""

    name: str
    """Of the run."""
    folder: Path
    """That its checkpoints are in, and may be brought to. All ranks see the same one."""
    which: str | None
    """What will be loaded: ``"latest"``, ``"auto"`` (the latest, or the beginning if there is none), a step,
    or a path. None: the run begins anew."""
    steps: Callable[[], Sequence[int]]
    """Returns the steps whose checkpoints are in ``folder``, oldest first."""
    mesh: Mesh
    """For collectives: all ranks are at the same point."""
    state: Callable[[], TrainState]
    """Returns the live state that a load would fill."""
    may_restart: bool = False
    """Whether a launcher would start the ranks again after a failure."""
    again: bool = False
    """Whether it has."""
    failed_at: float | None = None
    """Seconds since the epoch when it saw the failure, if it says so."""
    identity: Callable[[], Mapping[str, str]] = dict
    """Returns what has to be as it was for state to be restored bit by bit, each under a word for people:
    recipe, number of ranks, versions, code. Empty where nobody knows, as in a script."""
    recoverable: Callable[[int], None] = lambda step: None
    """Call it with a step at which the run could be started again without a checkpoint: a launcher counts
    that as progress."""
    delete_at_end: Callable[[Path], None] = lambda path: None
    """Have a launcher delete a folder when it ends, however its ranks ended."""


@attrs.define(frozen=True, eq=False)
class StepEnd:
    """A step of which nothing is left to do."""

    step: int
    """Steps done. After a rollback that of the checkpoint."""
    rollbacks: int
    """Of the run so far: state after more of them is later, whatever its step."""
    state: Callable[[], TrainState]
    """Returns what a checkpoint would hold now. Tensors are live, and stay as they are until the next
    ``on_before_update`` returns. Until then it may be called again."""


#: What a monitor may return from ``on_step`` or ``on_evaluation``, on any rank: all ranks learn of it.
Request = Literal["stop"] | Rollback


class Monitor:
    """Reacts to the events of a run, on every rank. Must not draw random numbers or change tensors.

    An exception inside a monitor is logged and the run goes on, unless ``[run] strict_monitors`` is
    set or it is a :class:`~nanotrain_core.errors.NanotrainError`, which stops the run with its text. If other
    ranks wait for this one in a collective of the monitor, they leave the event, too. One that fails in
    ``on_start``, on any rank, hears of nothing more on all of them, and checkpoints keep what they had of it.
    """

    every_step: bool = False
    """Whether ``on_step`` is called after every step, also of a run that logs only some. Each report costs
    one small all-reduce."""

    reads_weights: bool = True
    """Whether it may look at parameters: before each event, weights still on their way are waited
    for. One that does not lets them travel on; ``RunInfo.weights`` and ``RunInfo.logits`` wait by themselves,
    when they are asked. So only a monitor that looks at parameters in another way needs it."""

    declared: Sequence[Metric] = ()
    """The metrics that it publishes. Of a component the core puts here what ``Component.metrics`` says; a
    script's callback declares them in its class."""

    def on_before_restore(self, restore: Restore) -> None:
        """Bring checkpoints to ``restore.folder``, from where they would be found otherwise.

        The first event of all, called on all ranks of a run that has a folder, before a checkpoint is looked
        for. Whatever it raises ends the run, which would else begin anew in the place of what was to be
        brought: a :class:`~nanotrain_core.errors.NanotrainError` on all ranks alike has no traceback.
        """

    def on_recover(self, restore: Restore, at_least: int) -> TrainState | None:
        """Fill ``restore.state()`` in place of a load, and return what was saved; None leaves it to a load.

        Called on all ranks of a run that a launcher has started again, after all ``on_before_restore``, until
        a monitor has state to give. A rank returns state if all do. Nothing live may be touched before all
        ranks are known to have theirs whole. Whatever it raises ends the run.

        Args:
            restore: that of ``on_before_restore``.
            at_least: the step of the newest checkpoint, 0 without one: older state is of no use.
        """
        return None

    def on_start(self, run: RunInfo) -> None: ...

    def on_before_update(self, update: UpdateReport) -> None:
        """Look at what step ``update.step`` is about to update, and at its gradient.

        Called in every step, logged or not, on all ranks at the same point: forward and backward of all
        microbatches are done, gradients are summed over ranks, not yet clipped, and weights are still those
        that they were computed with. A step that is skipped, since its gradient is not finite, is one of
        them: nobody knows yet.

        Gradients are where the run's gradient sync keeps them, in ``parameter.grad`` on few layouts:
        :meth:`UpdateReport.gradients` and :meth:`UpdateReport.norms` have them on all.
        """

    def on_after_update(self, update: UpdateReport) -> None:
        """Look at what the step has changed: ``update.changes()`` if ``update.keep_weights()`` was called
        before it, the optimizer's state, and ``update.loads``.

        Called in every step of a monitor that has it, after the optimizer, skipped steps included. Weights
        that other ranks updated are waited for if ``reads_weights``.
        """

    def on_step(self, report: StepReport) -> Request | None: ...

    def on_metrics(self, report: MetricsReport) -> Request | None:
        """Hear the metrics of a logged step: the core's, and all that monitors published since the last one.

        Also called with those of an evaluation or a checkpoint. On a device other than a CPU what was
        published is reported one logged step late, at the end of the run at the latest.
        """

    def derive(self, report: MetricsReport) -> Mapping[str, float]:
        """Return metrics that follow from those of ``report``, as a ratio of two of them, by declared name.

        Called on every rank right before ``on_metrics`` of all monitors, which hear what is returned as if it
        had been published. Monitors after this one may derive from it. Values must be the same on all ranks.
        """
        return {}

    def on_evaluation(self, report: EvaluationReport) -> Request | None: ...

    def on_before_save(self, step: int) -> None:
        """Look at what is about to be saved as the checkpoint of step ``step``.

        Nothing has been written, and nothing is if all ranks raise a
        :class:`~nanotrain_core.errors.NanotrainError`.
        """

    def on_checkpoint(self, report: CheckpointReport) -> None: ...

    def on_save_failed(self, report: FailedSaveReport) -> None: ...

    def on_rollback(self, report: RollbackReport) -> None: ...

    def on_step_end(self, end: StepEnd) -> None:
        """Keep what the run is now, as a checkpoint would.

        The last event of every step, on all ranks: it was evaluated and gone back from where that was due.
        """

    def on_end(self, report: EndReport) -> None: ...

    def meta(self) -> dict[str, Any]:
        """Return what a checkpoint must remember of this monitor, as JSON, the same on every rank."""
        return {}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Take back what :meth:`meta` returned; not called for a checkpoint that knows nothing of it."""
