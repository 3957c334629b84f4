"""A step of a rank's run on ``meta``, of some of its microbatches, each action a phase of the recorder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs
import torch

from nanotrain_core.api import Action, Recipe
from nanotrain_core.api.torch import (
    Batch,
    Executor,
    Run,
    Shard,
    StopRequest,
    balance_routers,
    sum_over_data,
)
from nanotrain_plan.dry.recorder import Recorder
from nanotrain_plan.dry.tokens import TokensOfRanks

#: What a step does around its actions, in order.
AROUND = ("counts", "sync", "update", "balance")


class DryStep:
    """The steps of a run, as :meth:`RuntimeEngine._train_step` makes them, of some of the microbatches."""

    def __init__(self, run: Run, recorder: Recorder) -> None:
        self.run_, self.recorder = run, recorder
        recipe: Recipe = run.recipe
        split, shared = run.mesh.layout.row_dims, run.mesh.layout.sequence_dims
        shard = Shard(run.mesh.coordinate(*split), run.mesh.size(*split))
        rows = len(shard.rows(recipe.batch.sequences))
        tokens = torch.empty(rows, recipe.batch.length, dtype=torch.int64, device="meta")
        self.count = recipe.batch.microbatches(shard.count)
        mine = Batch(tokens, tokens.clone()).part(run.mesh.coordinate(*shared), run.mesh.size(*shared))
        self.batches = list(mine.split(recipe.batch.microbatch, self.count))
        self.tokens = TokensOfRanks(run, self.count)
        self.executor = RecordedExecutor(recorder, run)
        self.executor_actions: tuple[Action, ...] = ()

    def run(self, microbatches: Sequence[int], *, forward_first: bool, updates: bool) -> None:
        """Take a step with some of its microbatches, renumbered.

        With ``forward_first`` all forward passes come before the others: what a backward pass leaves is freed
        by whatever comes next. If that were a forward pass, its activations would be underestimated by as
        much, for each microbatch in flight. With one in flight the schedule's own order is exact: weights
        that a backward pass frees are gathered again by the next forward pass.
        """
        run, recorder, numbers = self.run_, self.recorder, {m: n for n, m in enumerate(microbatches)}
        sampled = (a for a in run.actions if a.microbatch in numbers)
        renumbered = (attrs.evolve(a, microbatch=numbers[a.microbatch]) for a in sampled)
        self.executor_actions = tuple(
            sorted(renumbered, key=lambda action: forward_first and action.kind != "F")
        )
        batches = [self.batches[number] for number in microbatches]
        if not self.tokens.even:
            self.executor.tokens_of = [partial(self.tokens.of, number) for number in microbatches]
        recorder.enter("counts")
        names = list(run.loss_weights)
        each = [run.feed.counts(batch) for batch in batches]
        zero = torch.zeros((), dtype=torch.float64)
        total = torch.stack([sum((counts[name] for counts in each), start=zero) for name in names])
        summed = sum_over_data(total, run.mesh, once_per_pipeline=True, extra_sums=StopRequest().flags())
        factors = dict(zip(names, (1 / summed[: len(names)].clamp(min=1)).unbind(), strict=True))
        self.executor.run(self.executor_actions, batches, factors)
        recorder.enter("sync")
        run.gradients.finish()
        if not updates:
            return
        recorder.enter("update")
        stats = run.optimizer.step(loss_scale=run.loss_scale.value)
        run.gradients.zero()
        recorder.enter("balance")
        balance_routers(run.stages.values(), run.mesh, skipped=stats.skipped)


class RecordedExecutor(Executor):
    """Begins a phase of the recorder with each action."""

    tokens_of: Sequence[Callable[[int], int]] = ()
    """See :attr:`Values.tokens_of`, by microbatch; empty if all ranks have as many."""

    def __init__(self, recorder: Recorder, run: Run) -> None:
        super().__init__(run.stages, run.gradients, run.mesh, run.owners, run.passes)
        self.recorder = recorder

    def _execute(self, action: Action) -> None:
        self.recorder.enter(str(action))
        if (values := self.recorder.values) is not None:
            values.tokens = tuple(self._microbatches[action.microbatch].tokens.shape)
            values.layout = self.mesh.layout
            values.tokens_of = self.tokens_of[action.microbatch] if self.tokens_of else None
        super()._execute(action)
