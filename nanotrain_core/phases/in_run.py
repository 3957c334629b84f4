"""Applies the phases of a recipe, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import structlog

from nanotrain_core.contracts import ChangesInRun, Model, Schedule
from nanotrain_core.errors import PluginError
from nanotrain_core.phases.timeline import Moment, PhaseTimeline, Value
from nanotrain_core.pipeline.actions import Action
from nanotrain_core.recipe.tree import BatchConfig, Recipe

if TYPE_CHECKING:
    from nanotrain_core.compose import Run
    from nanotrain_core.optim.lr_schedule import Scheduler


def begin_step(run: Run, scheduler: Scheduler | None = None, *, again: bool = False) -> Run:
    """Return the run as its next step needs it, and set the scheduler's rate.

    Args:
        run: as the last step used it.
        scheduler: of the learning rate.
        again: return the run as its last step used it, for an evaluation that was interrupted after it.
    """
    if run.phases is None:
        return run
    run = run.phases.advance(run, again=again)
    assert run.phases is not None
    if scheduler is not None and run.phases.lr is not None:
        scheduler.set_peak(run.phases.lr, of=run.optimizer_config.lr)
    return run


def scheduled_rate(run: Run, scheduler: Scheduler) -> float:
    """Return the learning rate of the run's next step: in a script that of its optimizer's first group.

    Otherwise it is independent of parameter groups: their rates may differ by a factor, and which groups
    exist, and which is first, depends on the parameters or ranges that a rank updates.
    """
    if run.phases is None:
        return float(scheduler.get_last_lr()[0])
    return scheduler.lr_lambdas[0](scheduler.last_epoch) * (run.phases.lr or run.optimizer_config.lr)


class RunPhases:
    """The values that phases change in a run, as currently in force.

    These depend only on the tokens that the run has trained on, which its checkpoints contain: a resumed run,
    or one that rolled back, immediately has the right values.
    """

    def __init__(self, recipe: Recipe, model: Model, schedule: Schedule, pp: int, dp: int) -> None:
        """Create them for a run with ``pp`` pipeline ranks and ``dp`` data-parallel ones.

        Raises:
            PluginError: keys of the model change, and the model does not support it.
        """
        self.recipe, self.timeline = recipe, PhaseTimeline(recipe)
        self._model, self._schedule, self._pp, self._dp = model, schedule, pp, dp
        self._now: Moment | None = None
        ours = [key for phase in recipe.phase for key in phase.changes if key.startswith("model.")]
        if ours and not isinstance(model, ChangesInRun):
            raise PluginError(
                f"model '{recipe.model.use}' marks {ours[0]} as a key that a phase may change, and has no "
                "change(config, parts): see nanotrain_core.api.torch.ChangesInRun"
            )

    def split_backward(self, actions: Sequence[Sequence[Action]]) -> bool:
        """Return whether there are W passes: in ``actions``, or at the beginning or end of any phase."""
        corners = (self._actions(recipe.batch) for _, recipe in self.timeline.corners())
        return any(action.kind == "W" for each in (actions, *corners) for rank in each for action in rank)

    def _actions(self, batch: BatchConfig) -> Sequence[Sequence[Action]]:
        return self._schedule.actions(self._pp, batch.microbatches(self._dp))

    def advance(self, run: Run, *, again: bool = False) -> Run:
        """Return the run as its next step needs it; ``again``: as its last one did."""
        if not self.recipe.phase:
            return run
        tokens = run.feed.tokens_before if again else run.feed.tokens
        moment, before = self.timeline.at(tokens), self._now
        if moment == before:
            return run
        self._now = moment
        if before is None or before.number != moment.number:
            self._report_phase(run, moment)
        changed = _changed(before, moment)
        now = self.timeline.recipe_with(moment.values)
        if any(key.startswith("batch.") for key in changed):
            run.feed.resize(now.batch, self.timeline.validated_at(moment.number))
            run = self._with_batch(run, now.batch)
        if any(key.startswith("model.") for key in changed):
            assert isinstance(self._model, ChangesInRun)
            self._model.change(now.model.config, tuple(run.stages.values()))
            run.passes.model_changes += 1
            run = attrs.evolve(run, model=now.model, loss_weights=self._model.loss_weights)
        return attrs.evolve(run, flops_per_token=self._model.flops(now.batch.length).total)

    def _with_batch(self, run: Run, batch: BatchConfig) -> Run:
        """Return the run with the schedule of ``batch``; stages are unchanged."""
        actions = self._actions(batch)
        mine = actions[run.mesh.coordinate("pp") if self._pp > 1 else 0]
        return attrs.evolve(run, actions=mine, schedule=actions)

    @property
    def model_keys(self) -> frozenset[str]:
        """Keys of ``[model]`` that any phase changes: checkpoints of other phases differ in them."""
        keys = (key for phase in self.recipe.phase for key in phase.changes)
        return frozenset(key.partition(".")[2] for key in keys if key.startswith("model."))

    @property
    def number(self) -> int | None:
        """The index of the current phase, from 0; None in a recipe without phases."""
        return self._now.number if self._now else None

    @property
    def lr(self) -> float | None:
        """The current learning rate, before warm-up; None: no phase changes it."""
        return self._now.values.get("optimizer.lr") if self._now else None

    def _report_phase(self, run: Run, moment: Moment) -> None:
        """Report on rank 0 and in the run's log that a phase begins, or continues after a resume."""
        if run.mesh.rank:
            return
        phase, since = self.recipe.phase[moment.number], self.timeline.spans[moment.number].begins
        named = {"name": phase.name} if phase.name else {}
        log = structlog.get_logger("nanotrain.phases")
        log.info("in phase", phase=moment.number, **named, since_tokens=since, tokens=run.feed.tokens)


def _changed(before: Moment | None, moment: Moment) -> Mapping[str, Value]:
    """Return the values that have changed; all of them at the beginning."""
    old = before.values if before else {}
    return {key: value for key, value in moment.values.items() if key not in old or old[key] != value}
