"""The step loop of every run: restore, then step, report, evaluate and save until done."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import attrs
import torch
from torch import nn

from nanotrain_core.checkpoint.saver import CheckpointSaver
from nanotrain_core.compile.captured_executor import CapturingExecutor
from nanotrain_core.compose import Run, compose
from nanotrain_core.contracts import EndReport, Monitor, StepEnd, StepStats, UpdateReport
from nanotrain_core.layout.parameters_in_flight import install_ready_hooks
from nanotrain_core.moe.routing import balance_routers, counting_routers
from nanotrain_core.optim.lr_schedule import Scheduler, lr_scheduler
from nanotrain_core.phases.in_run import begin_step, scheduled_rate
from nanotrain_core.pipeline.executor import Executor, Losses
from nanotrain_core.pipeline.replay import replay
from nanotrain_core.recipe.tree import Recipe
from nanotrain_core.run import log
from nanotrain_core.run.divergence import SkippedSteps, may_save
from nanotrain_core.run.evaluation import evaluate
from nanotrain_core.run.events import Events
from nanotrain_core.run.folder_claim import claimed
from nanotrain_core.run.global_metrics import agree_now, folder_lost, global_counts
from nanotrain_core.run.monitor_context import MonitorContext
from nanotrain_core.run.recovery import Restart
from nanotrain_core.run.restore import restore
from nanotrain_core.run.rollback import keep_pending, roll_back
from nanotrain_core.run.run_info import run_info
from nanotrain_core.run.run_progress import RunProgress
from nanotrain_core.run.step_readback import StepFlags, StepReadback
from nanotrain_core.run.step_report import report_step
from nanotrain_core.run.stop import StopRequest
from nanotrain_core.run.throughput import Throughput
from nanotrain_core.run.train_state import capture_state, load_checkpoint
from nanotrain_core.run.validate_components import check_first_step
from nanotrain_core.watch.progress import FAILED, Progress

if TYPE_CHECKING:
    from nanotrain_core.registry.registry import Registry
    from nanotrain_core.script import ScriptConfig
    from nanotrain_core.script.feed import Loader


class RuntimeEngine:
    """Trains a model, built from a recipe, or in a script from your own model and optimizer.

    ::

        config = ScriptConfig(clip_norm=1.0, folder="runs/mine", save_every=100, resume="auto")
        engine = RuntimeEngine(model, torch.optim.AdamW(model.parameters()), config)
        engine.fit(train_loader, val_loader, steps=1000)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: ScriptConfig | None = None,
        *,
        callbacks: Sequence[Monitor] = (),
        **options: Any,
    ) -> None:
        """Wrap a plain model and optimizer; :func:`nanotrain_core.script.adapt` documents ``options``."""
        from nanotrain_core.script import adapt

        run = adapt(model, optimizer, config, callbacks=callbacks, **options)
        self._setup(run, folder=run.recipe.folder, resume=run.recipe.resume)

    @classmethod
    def from_recipe(
        cls,
        recipe: Recipe | str | Path,
        *,
        registry: Registry | None = None,
        rank: int = 0,
        device: torch.device | str = "cpu",
        folder: Path | None = None,
        resume: str | None = None,
        callbacks: Sequence[Monitor] = (),
    ) -> Self:
        """Compose a recipe on this rank.

        Args:
            recipe: resolved, or the path or name of a recipe file.
            registry: the plugins; all installed ones by default.
            rank: this process's; above 0 only in an initialized process group.
            device: the device on which this rank computes.
            folder: the run folder; without one nothing is saved.
            resume: the checkpoint to start from: ``"latest"``, a step or a path; ``"auto"`` is the latest,
                or the beginning if there is none.
            callbacks: monitors in addition to the recipe's, called after them, on this rank: give all ranks
                the same.

        Raises:
            NanotrainError: the recipe cannot be run; mostly a RecipeError, PluginError or DataError.
        """
        from nanotrain_core.recipe import load_recipe
        from nanotrain_core.registry.registry import load_plugins

        if isinstance(recipe, str | Path):
            recipe = load_recipe(recipe)
        engine = cls.__new__(cls)
        weights = recipe.run.weights if resume in (None, "auto") else None  # a checkpoint replaces them
        run = compose(recipe, registry or load_plugins(), rank=rank, device=device, weights=weights)
        run = attrs.evolve(run, monitors=[*run.monitors, *callbacks])
        engine._setup(run, steps=recipe.run.steps, folder=folder, resume=resume)
        return engine

    def _setup(
        self, run: Run, *, steps: int = 0, folder: Path | None = None, resume: str | None = None
    ) -> None:
        self.run, self.steps, self.folder, self.resume = run, steps, folder, resume
        self.restart = Restart()
        """The launcher's information about a restart of the ranks."""
        self.reached = RunProgress()
        """How far the run has come: its step, and what is pending. Saved in checkpoints."""
        log.ensure(run.mesh.rank)
        self.stop = StopRequest()
        self.weights_ready = install_ready_hooks(run.stages.values(), run.optimizer)
        """Waits for weights that the optimizer's last step left in flight."""
        parts = run.stages, run.gradients, run.mesh, run.owners, run.passes
        self.executor = Executor(*parts)
        if run.cuda_graphs:
            self.executor = CapturingExecutor(*parts, weights_ready=self.weights_ready)
        self.events = Events(
            run.monitors, self.stop, strict=run.strict_monitors, weights_ready=self.weights_ready
        )
        self.progress = Progress(run.mesh.waits)
        """Tells the watchdog what this rank is doing."""
        self.throughput, self.skipped = Throughput(), SkippedSteps()

    @property
    def step(self) -> int:
        """Optimizer steps done, those before a resume included."""
        return self.reached.step

    # --- training -----------------------------------------------------------------------------

    def fit(
        self,
        train_loader: Loader | None = None,
        val_loader: Loader | None = None,
        *,
        steps: int | None = None,
    ) -> EndReport:
        """Train until ``steps`` optimizer steps are done or a stop is requested.

        Args:
            train_loader: a script's batches, iterated again when they run out. Recipes name their data.
            val_loader: a script's validation batches.
            steps: total number; a script must give it, a recipe has it.

        Returns:
            How the run ended.

        Raises:
            CheckpointError: there is nothing to resume from, or it is damaged or does not fit.
            FolderError: the folder is in use by another process, or cannot be written.
            Diverged: training diverged.
            SaveFailed: the last save failed, or several in a row.
        """
        with claimed(self), log.kept_in(self.folder, self.run.mesh.rank, lambda: self.step):
            return self._fit(train_loader, val_loader, steps)

    def _fit(self, train_loader: Loader | None, val_loader: Loader | None, steps: int | None) -> EndReport:
        if steps is None and not self.steps:
            raise TypeError("fit needs steps=..., the total number of optimizer steps")
        self.run.feed.use(train_loader, val_loader, go_on=self.step > self.steps)
        self.steps = self.steps if steps is None else steps
        self.stop.clear()
        self.run.gradients.zero()
        self.executor.check_model()
        for router in counting_routers(self.run.stages.values()).values():
            router.take_load()  # of an interrupted step: the next one would count it too
        self.saved_step = -1
        """The step last saved or loaded, -1 before that."""
        self.readback = StepReadback(late=self.run.mesh.device_is_async)
        self._trained: list[str] = []
        """Names of the whole model's trained parameters, once a monitor has asked for them."""
        checkpoint = self.run.checkpoint if self.folder else None
        saved, failed = self.events.checkpoint, self.events.save_failed
        self.saves = CheckpointSaver(checkpoint, saved, failed, self.progress)
        self.monitoring = MonitorContext(self.run, self.events)
        restore(self)
        self._first = self.step
        """The step from which this call of fit starts."""
        self.run = begin_step(self.run, again=self.reached.evaluation_pending)
        info = run_info(self)
        self.throughput.restart()
        log.begin(name=self.run.name, steps=self.steps, ranks=info.world_size)
        self.monitoring.start(info)
        try:
            with self.stop.on_signals():
                self._loop()
        except BaseException as problem:
            self.note(FAILED)
            log.record("error", "run failed", error=repr(problem))
            self.events.end(self._end_report("failed"))
            raise
        finally:
            self.monitoring.observers.remove()
        self.weights_ready()
        report = self._end_report(self.stop.reason or "done")
        self.events.end(report)
        self.monitoring.collectives.close()
        log.record("info", "run ends", reason=report.reason)
        return report

    def _loop(self) -> None:
        run = self.run
        scheduler, scale = self._lr_scheduler(), run.loss_scale.value
        if self.reached.evaluation_pending or (run.evaluation.every and self.step == 0):
            self._evaluate()
        while self.step < self.steps and not self.stop.reason:
            run = self.run = begin_step(self.run, scheduler)
            lr, scale = scheduled_rate(run, scheduler), run.loss_scale.value
            losses, counts, stats = self._train_step()
            scheduler.step()
            self.reached.step += 1
            feed = run.feed
            feed.step_done()
            self.throughput.add(feed.tokens - feed.tokens_before, feed.length, run.flops_per_token)
            last = self.step == self.steps
            logged = self._logged(self.step) or self.stop.reason is not None
            if logged or self.events.every_step:
                self.note("monitors")
                report_step(self, losses, counts, stats, lr=lr, loss_scale=scale, logged=logged)
            if last or (run.evaluation.every and self.step % run.evaluation.every == 0):
                self._evaluate()
            due = self.saves.due(self.step) or self.reached.save_pending
            if last:
                self.events.metrics(*self.monitoring.reducer.rest())
            if last or due:  # a state that a rollback will discard is not worth saving
                self._handle_flags(self.readback.rest())
                agree_now(self.stop, self.run.mesh)
            # Skipped steps change no weight: saving them would only rotate older checkpoints out.
            self.reached.save_pending = due and self.skipped.in_a_row > 0
            if self.stop.rollback_agreed:
                roll_back(self)
                scheduler = self._lr_scheduler()
            elif due and not (last or self.reached.save_pending or self.stop.reason):  # the last: below
                self._save()
            self.saves.advance(wait=False)
            self.events.step_end(StepEnd(self.step, len(feed.skipped), partial(capture_state, self)))
        self._handle_flags(self.readback.rest())
        keep_pending(self.stop, run.mesh)
        self.events.metrics(*self.monitoring.reducer.last(self.step))
        if self.saved_step != self.step and self.stop.reason != "lost":  # there is no folder to save in
            self._save(last=True)
        self.note("checkpoint")
        self.saves.advance(wait=True, last=self.stop.reason != "lost")
        self.note("end")
        self.skipped.check_last_steps(self.step, scale, stopped=self.stop.reason is not None)

    def _logged(self, step: int) -> bool:
        """Return whether a step is logged, unless a stop request makes it the last."""
        return step % self.run.log_every == 0 or step == self.steps

    def _lr_scheduler(self) -> Scheduler:
        run = self.run
        return lr_scheduler(run.optimizer.inner, run.optimizer_config.lr_schedule, self.steps, done=self.step)

    def _train_step(self) -> tuple[Losses, Losses, StepStats]:
        """Take one optimizer step. Every gradient is a plain sum: losses are divided by global counts first.

        ``run.gradients`` is the gradient sync of ``ddp`` or ``zero12``, or the core's ``AllReduceGradients``;
        ``run.actions`` is this rank's list from the schedule; both are built in ``compose.py``. The loss
        scale is 1 except in fp16. The learning rate was set by the scheduler of :meth:`_loop`, in the
        optimizer's parameter groups.

        Returns:
            For each loss term, this rank's sum over its microbatches, not scaled; the global counts by which
            these sums are divided, float64 scalars of at least 1; and the optimizer's report of the step.
        """
        run = self.run
        self.note("data")
        microbatches = run.feed.microbatches()
        self.note("forward and backward")
        batch_counts = [run.feed.counts(batch) for batch in microbatches]
        counts, own_counts, stop_flags = global_counts(
            batch_counts, list(run.loss_weights), run.mesh, self.stop
        )
        scale = run.loss_scale.value
        factors = {name: run.loss_weights[name] * scale / count for name, count in counts.items()}
        logged = self._logged(self.step + 1)
        with self.monitoring.observers.observing(logged):
            losses = self.executor.run(run.actions, microbatches, factors)
        self.note("gradient sync")
        run.gradients.finish()
        check_first_step(run, losses, own_counts, done=self.step - self._first)
        self.note("monitors before the update")
        replay_step = partial(replay, self.executor, run.mesh, microbatches, factors)
        update = UpdateReport(
            step=self.step + 1,
            loss_scale=scale,
            logged=logged,
            sync=run.gradients,
            mesh=self.monitoring.mesh,
            counts=counts,
            tokens=run.feed.tokens_per_step,
            names=self._trained,
            replay=self.monitoring.collectives.before(replay_step),
        )
        self.events.before_update(update)
        self.saves.settle()
        self.note("optimizer")
        stats = run.optimizer.step(loss_scale=scale)
        flags = self.readback.after(self.step + 1, stop_flags, stats)  # on a GPU those of the step before
        run.gradients.zero()
        self.loads = balance_routers(run.stages.values(), run.mesh, skipped=stats.skipped)
        run.loss_scale.update(stats.skipped)
        update.loads.update(self.loads)
        self.events.after_update(update)
        self._handle_flags(flags)
        return losses, counts, stats

    def _handle_flags(self, flags: StepFlags | None) -> None:
        """Act on the flags of a step: of this one, or of the previous one where values are read late."""
        if flags is None:
            return
        self.stop.agree(flags.requests)
        self.skipped.record(flags, self.saves)

    # --- what happens between steps -----------------------------------------------------------

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Report the mean next-token loss over the validation batches to the monitors. Collective.

        A stop request ends it without a report; a resumed run then evaluates before its first step.
        """
        if report := evaluate(self):
            self.reached.note_evaluation(report.loss)
            self.events.evaluation(report)
        self.throughput.restart()

    def _save(self, *, last: bool = False) -> None:
        """Begin a checkpoint, if there is a run folder. The last one is complete when this returns."""
        if self.saves.checkpoint is None or folder_lost(self.stop, self.run.mesh):
            return
        self.note("checkpoint")
        self.events.before_save(self.step)
        state = capture_state(self)
        self.reached.save_pending = not may_save(self.run, state, self.step, self.saves, last=last)
        if self.reached.save_pending:
            return
        self.saved_step = self.step
        self.saves.begin(self.step, state, last=last)
        self.throughput.restart()

    def load(self, which: str) -> bool:
        """Restore weights, optimizer state and progress from a checkpoint; return False if there is none.

        Called by :meth:`fit` after it has opened the run folder, and for a rollback.

        Raises:
            NanotrainError: on all ranks, in most cases a CheckpointError: it is damaged or does not fit. The
                state of this engine is unchanged.
        """
        if not load_checkpoint(self, which):
            return False
        # A further call of fit continues from where this one ends.
        self.saved_step, self.resume = self.step, None
        return True

    def note(self, phase: str) -> None:
        """Report this rank's current phase to the watchdog."""
        self.progress.note(phase, self.step, first=self.step == self._first)

    def _end_report(self, reason: Any) -> EndReport:
        return EndReport(self.step, reason, self.run.feed.tokens)
