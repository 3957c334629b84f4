"""The events a monitor receives and what it may return."""

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
    """The description of a run for its monitors. Read-only by convention."""

    name: str
    """``run.name`` of the recipe."""
    folder: Path | None
    """The run folder; None: the run writes none."""
    steps: int
    """Optimizer steps of the whole run."""
    first_step: int
    """Steps already done when this run began: above 0 after a resume."""
    rank: int
    """Number of this rank among all, from 0."""
    world_size: int
    """Number of all ranks."""
    device: torch.device
    """This rank's."""
    parameters: int
    """Parameter count of the whole model."""
    tokens_per_step: int
    """Tokens of the first step's batch; phases of a recipe may change it."""
    length: int | None
    """Sequence length in tokens in the first step. Phases may change it; ``StepReport.length`` has the length
    of every step. None in a script."""
    flops_per_token: float
    """Model FLOPs per token in the first step: ``StepReport.flops_per_token`` has that of others."""
    recipe: Any
    """The frozen recipe, or the config of a script."""
    optimizer_bytes: int
    """Bytes of optimizer state and masters on this rank when the run began, wherever they are held. In a
    script they may be allocated only by the first update."""
    optimizer_device_bytes: Callable[[], int]
    """Bytes of optimizer state and masters currently on :attr:`device`: offloaded state is not counted."""
    mesh: Mesh
    """Coordinates and collectives of this rank."""
    parts: Sequence[nn.Module]
    """This rank's model parts."""
    placed: Sequence[PlacedParameter]
    """This rank's parameters."""
    data: Any
    """The data component, or a script's loader."""
    logits: Callable[..., torch.Tensor]
    """``logits(tokens, document_starts=None)``, collective: the model's logits [B, S, V] for tokens int64
    [B, S], in the dtype that the model returns, on every rank of any layout. With ``document_starts`` int64
    [B, S] as ``Batch.document_starts``, documents are masked from one another."""
    progress: Progress
    """This rank's position in the step, and how long its phases took."""
    weights: Callable[[], Iterator[tuple[torch.Tensor, Placement]]]
    """``weights()`` yields (weight, placement) of every parameter on this rank, dequantized, in the shape of
    its block: for ``metrics.placed``."""
    optimizer_state: Callable[..., Iterator[tuple[torch.Tensor, Placement]]]
    """``optimizer_state(*names)`` yields, for each parameter that this rank updates, its state tensors of
    these names, such as ``exp_avg`` or ``master``, each with the placement of its parameter; a range of a
    parameter in several boxes. State that is all on each rank with a part of the parameter is yielded where
    its first element is, so that ``metrics.placed`` counts it once; so is state with some of its axes, as a
    mean over rows, for each block of these. Scalars, and state that does not exist or
    is not stored in floating point, are omitted. ``wanted=lambda placement: ...`` selects parameters: nothing
    is done for others."""
    observe_outputs: Callable[..., Sequence[str]]
    """``observe_outputs(look, ["layers.*.attn"])`` makes the core call ``look(name, output)`` with the
    modules' outputs in logged steps: see
    :meth:`nanotrain_core.run.module_observers.ModuleObservers.observe_outputs`. In ``on_start``, on all
    ranks."""
    observe_calls: Callable[..., Sequence[str]]
    """``observe_calls("attention", look, ["layers.*"])`` makes the core call ``look(name, *args)`` with the
    arguments of the layers' calls to a function of their table: see
    :meth:`nanotrain_core.run.module_observers.ModuleObservers.observe_calls`. In ``on_start``, on all
    ranks."""
    monitor_barrier: Callable[[], None]
    """Collective: return when this monitor has arrived here on all ranks. If it fails on one rank meanwhile,
    its event ends on all of them. The methods of ``mesh``, ``logits`` and ``UpdateReport.norms`` begin with
    it; call it before a collective in a process group."""
    metrics: Metrics
    """The object through which this monitor publishes metrics."""
    schedule: Sequence[Sequence[Action]] = ()
    """The actions of every pipeline rank in a step, in order: those of the first step if phases change the
    batch. Empty in a script."""
    current_schedule: Callable[[], Sequence[Sequence[Action]]] = attrs.Factory(
        lambda self: lambda: self.schedule, takes_self=True
    )
    """Returns :attr:`schedule` as the current step has it."""
    pipeline_share: float = 1.0
    """FLOPs of this rank's pipeline stages over the mean of pipeline ranks."""
    declared: Sequence[Metric] = ()
    """All metrics that the core and this run's monitors declare."""
    described: Sequence[str] = ()
    """Lines that describe the stages and the modules' precision, the same on every rank."""


@attrs.define(frozen=True, eq=False)
class Restore:
    """A run that is about to search for its checkpoints. The same on every rank, except ``mesh``."""

    name: str
    """Name of the run."""
    folder: Path
    """The folder of its checkpoints, to which they may be copied. All ranks see the same one."""
    which: str | None
    """What will be loaded: ``"latest"``, ``"auto"`` (the latest, or the beginning if there is none), a step,
    or a path. None: the run starts from the beginning."""
    steps: Callable[[], Sequence[int]]
    """Returns the steps whose checkpoints are in ``folder``, oldest first."""
    verify: Callable[[int], Sequence[str]]
    """Returns what is wrong with the checkpoint of a step, by its own hashes: nothing if it is intact."""
    mesh: Mesh
    """For collectives: all ranks are at the same point."""
    state: Callable[[], TrainState]
    """Returns the live state that a load would fill."""
    may_restart: bool = False
    """Whether a launcher would restart the ranks after a failure."""
    restarted: bool = False
    """Whether a launcher has restarted the ranks."""
    failed_at: float | None = None
    """When the launcher detected the failure, in seconds since the epoch; None if unknown."""
    identity: Callable[[], Mapping[str, str]] = dict
    """Returns what must be unchanged for state to be restored bit by bit, each under a human-readable key:
    recipe, number of ranks, versions, code. Empty where it is unknown, as in a script."""
    recoverable: Callable[[int], None] = lambda step: None
    """Call it with a step from which the run could be restarted without a checkpoint: a launcher counts
    that as progress."""
    delete_at_end: Callable[[Path], None] = lambda path: None
    """Ask the launcher to delete a folder when it exits, however its ranks ended."""
    heartbeat: Callable[[], None] = lambda: None
    """Call it again and again, equally often on all ranks, as long as work that takes long advances on any of
    them: otherwise ranks count as hung, also those that wait for others, after five times
    ``run.hang_timeout``."""


@attrs.define(frozen=True, eq=False)
class StepEnd:
    """A step whose work is complete."""

    step: int
    """Steps done. After a rollback, the step of the checkpoint."""
    rollbacks: int
    """Rollbacks of the run so far: state after more of them is later, whatever its step."""
    state: Callable[[], TrainState]
    """Returns what a checkpoint would hold now. The tensors are live and do not change until the next
    ``on_before_update`` returns. Until then it may be called again."""


#: What a monitor may return from ``on_step`` or ``on_evaluation``, on any rank; it is sent to all ranks.
Request = Literal["stop"] | Rollback


class Monitor:
    """Reacts to the events of a run, on every rank. Must not draw random numbers or modify tensors.

    An exception inside a monitor is logged and the run continues, unless ``[run] strict_monitors`` is set or
    it is a :class:`~nanotrain_core.errors.NanotrainError`, which stops the run with its text once the other
    monitors have received the event. If other ranks
    wait for this one in a collective of the monitor, they leave the event, too. A monitor that fails in
    ``on_start``, on any rank, receives no further events on any rank, and checkpoints keep its previous
    state.
    """

    every_step: bool = False
    """Whether ``on_step`` is called after every step, even in a run that logs only some. Each report costs
    one small all-reduce."""

    reads_weights: bool = True
    """Whether it may read parameters: before each event, the core waits for weights still in flight. Without
    it their transfer overlaps the event; ``RunInfo.weights`` and ``RunInfo.logits`` wait by themselves when
    called, so only a monitor that reads parameters in another way needs it."""

    declared: Sequence[Metric] = ()
    """The metrics that it publishes. The core sets this to ``Component.metrics`` of the component; a
    script's callback declares them in its class."""

    def on_before_restore(self, restore: Restore) -> None:
        """Copy checkpoints into ``restore.folder`` from where the core would not find them.

        The first event, called on all ranks of a run that has a folder, before the core searches for a
        checkpoint. Any exception ends the run, which would otherwise start from the beginning instead of from
        the missing checkpoint. A :class:`~nanotrain_core.errors.NanotrainError` on all ranks alike has no
        traceback.
        """

    def on_recover(self, restore: Restore, at_least: int) -> TrainState | None:
        """Fill ``restore.state()`` instead of a load, and return what was saved; None leaves it to a load.

        Called on all ranks of a run that a launcher has restarted, after all ``on_before_restore``, until a
        monitor has state to give. Either all ranks return state or none does. Modify no live state before all
        ranks are known to have theirs intact. Any exception ends the run.

        Args:
            restore: that of ``on_before_restore``.
            at_least: the step of the newest checkpoint, 0 without one: older state is not usable.
        """
        return None

    def on_start(self, run: RunInfo) -> None:
        """Prepare, on all ranks, before the first step of this call of ``fit``.

        Any checkpoint has been loaded. Keep ``run.metrics`` here to publish with.
        """

    def on_before_update(self, update: UpdateReport) -> None:
        """Inspect what step ``update.step`` is about to update, and its gradient.

        Called in every step, logged or not, on all ranks at the same point: forward and backward of all
        microbatches are done, gradients are summed over ranks but not yet clipped, and weights are still
        those that they were computed with. This includes a step that will be skipped because its gradient is
        not finite: that is not known yet.

        Gradients are where the run's gradient sync keeps them; only a few layouts have them in
        ``parameter.grad``: :meth:`UpdateReport.gradients` and :meth:`UpdateReport.norms` have them on all
        layouts.
        """

    def on_after_update(self, update: UpdateReport) -> None:
        """Inspect what the step has changed: ``update.changes()`` if ``update.keep_weights()`` was called
        before it, the optimizer's state, and ``update.loads``.

        Called in every step of a monitor that defines it, after the optimizer, skipped steps included. Waits
        for weights that other ranks updated if ``reads_weights``.
        """

    def on_step(self, report: StepReport) -> Request | None:
        """Receive a logged step, or every step if :attr:`every_step`. May return a request."""

    def on_metrics(self, report: MetricsReport) -> Request | None:
        """Receive the metrics of a logged step: the core's, and all published by monitors since the last.

        Also called with the metrics of an evaluation, then with those published until its end, and with those
        of a checkpoint. On a device other than a CPU, published metrics are reported one logged step late,
        after an evaluation or at the end of the run at the latest.
        """

    def derive(self, report: MetricsReport) -> Mapping[str, float]:
        """Return metrics that are derived from those of ``report``, such as a ratio of two, by declared name.

        Called on every rank right before ``on_metrics`` of all monitors, which receive the returned metrics
        as if they had been published. Later monitors may derive from them. Values must be the same on all
        ranks.
        """
        return {}

    def on_evaluation(self, report: EvaluationReport) -> Request | None:
        """Receive the result of an evaluation. May return a request."""

    def on_before_save(self, step: int) -> None:
        """Inspect what is about to be saved as the checkpoint of step ``step``.

        Nothing has been written yet, and nothing will be if all ranks raise a
        :class:`~nanotrain_core.errors.NanotrainError`.
        """

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """Receive a checkpoint that is complete and in place."""

    def on_save_failed(self, report: FailedSaveReport) -> None:
        """Receive a save that failed, on this rank or another.

        Training continues, unless it was the third in a row or that at the end of the run.
        """

    def on_rollback(self, report: RollbackReport) -> None:
        """Receive a rollback, after the run was restored from an earlier checkpoint."""

    def on_step_end(self, end: StepEnd) -> None:
        """Keep the current state of the run, as a checkpoint would.

        The last event of every step, on all ranks, after any evaluation or rollback that was due.
        """

    def on_end(self, report: EndReport) -> None:
        """Receive how the run ended: the last event, also after a failure.

        Monitors with ``on_before_restore`` are called first: the upload of the last checkpoint may fail.
        If one raises a :class:`~nanotrain_core.errors.NanotrainError`, the run fails, as later ones are told.

        After a failure (``report.reason == "failed"``), other ranks may not be here: no collectives then.
        End threads and undo what the monitor has changed of the process, which may be used again
        (``run.in_process_restart``).
        """

    def suspect_steps(self) -> int:
        """Return how many of the last steps this monitor may still request a rollback of, as of now.

        Retention keeps the newest checkpoint from before them, also while no step has looked bad yet.
        """
        return 0

    def meta(self) -> dict[str, Any]:
        """Return the state of this monitor for the checkpoint, as JSON, the same on every rank."""
        return {}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Restore what :meth:`meta` returned; not called for a checkpoint without state of this monitor.

        One resume or rollback may call it several times, also with the state of a checkpoint that is then
        refused: it replaces the state of this monitor.
        """
