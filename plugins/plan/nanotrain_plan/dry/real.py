"""A step that really happens on gloo, and the one that a plan predicts for it, recorded at one seam."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn

from nanotrain_core.api import Action, Layout, PhaseTimeline, Recipe, Registry, Role, Selection, tagged
from nanotrain_core.api.torch import Routing, Run, RuntimeEngine, shard_range
from nanotrain_plan.dry.collectives import Collective
from nanotrain_plan.dry.held import held_by
from nanotrain_plan.dry.phase import Phase
from nanotrain_plan.dry.rank import dry_rank, dry_recipe, survey
from nanotrain_plan.dry.recorder import Recorder
from nanotrain_plan.dry.step import RecordedExecutor
from nanotrain_plan.dry.values import Values

#: Phases of a dry step that follow its actions: an engine's step does not tell where each begins.
AFTER = ("sync", "update", "balance")


@attrs.define(frozen=True, kw_only=True)
class StepRecord:
    """What one rank holds, and what it does in a step."""

    state: dict[str, int]
    """Bytes between steps, by holder, as composed: without buffers."""
    buffers: int
    """Bytes that one step leaves to the next beside these: buckets of gradient sync, its batch."""
    collectives: list[tuple[str, Collective]]
    """In order, each with its action or what of a step it belongs to: ``counts``, ``F0.1``, ``after``."""
    kept: dict[str, int]
    """Bytes that each forward pass leaves behind, those it frees not counted."""
    peak: int
    """Most bytes alive, above those before the first step; of a later step, which finds its buffers there."""


def of_phases(state: dict[str, int], phases: Sequence[Phase]) -> StepRecord:
    """Return what phases of a recorder say."""
    return StepRecord(
        state={holder: size for holder, size in state.items() if holder != "other"},  # a run's data is there
        collectives=[
            ("after" if phase.name in AFTER else phase.name, each)
            for phase in phases
            for each in phase.collectives
        ],
        kept={p.name: sum(storage.bytes for storage in p.kept) for p in phases if p.name[0] == "F"},
        buffers=phases[-1].after - sum(state.values()),
        peak=_highest(phases) - sum(state.values()),
    )


def _highest(phases: Sequence[Phase]) -> int:
    """Return the most bytes alive in a later step than the one that made what lasts."""
    there = sum(phase.lasting for phase in phases)
    most = 0
    for phase in phases:
        most = max(most, there + phase.before, there + phase.peak - phase.lasting)
        there -= phase.lasting
    return most


# --- predicted ------------------------------------------------------------------------------------


def predict(recipe: Recipe, registry: Registry, layout: Layout) -> list[StepRecord]:
    """Return a step of every rank as a plan has it: on CPUs, with the largest batch and all microbatches."""
    recipe = dry_recipe(PhaseTimeline(recipe).largest(), registry, host=True)
    pp = layout.degree("pp")
    stride = layout.view(["pp"]).stride("pp") if pp > 1 else 0
    told = survey(recipe, registry, [n * stride for n in range(pp)], host=True) if pp > 1 else []
    pipelines, found = defaultdict[int, Values](Values), []  # of uneven shares their messages differ
    for rank in range(layout.world_size):
        values = pipelines[rank % stride if pp > 1 else 0]
        step = dry_rank(recipe, registry, layout, rank, told, values, host=True, every_microbatch=True)
        found.append(of_phases(dict(step.state), step.phases))
    return found


# --- real -----------------------------------------------------------------------------------------


def quiet(doing: str) -> None:
    """Tell nobody what is done."""


class RecordedEngine(RuntimeEngine):
    """Records its second step, and ends with it."""

    recorder: Recorder
    tell: Callable[[str], None] = staticmethod(quiet)
    phases: Sequence[Phase] = ()

    def _train_step(self) -> Any:
        self.tell(f"step {self.step + 1} of 2")
        first = len(self.recorder.phases)
        self.recorder.enter("counts")
        found = super()._train_step()
        self.recorder.enter("end")
        if self.step == 1:  # a first step also describes messages, and allocates
            self.phases = self.recorder.phases[first:-1]
            self.steps = self.step + 1
        return found


class _Executor(RecordedExecutor):
    """Names what follows the actions too, and ends no phase before gloo is done with its tensors."""

    def _execute(self, action: Action) -> None:
        _settle(self.recorder)
        super()._execute(action)

    def run(self, actions: Sequence[Action], *args: Any) -> Any:
        found = super().run(actions, *args)
        _settle(self.recorder)
        self.recorder.enter("after")
        return found


def _settle(recorder: Recorder) -> None:
    """Return once no more memory is freed: gloo's threads hold what was sent a moment longer."""
    level, unchanged = recorder.live, 0
    while unchanged < 3:
        time.sleep(0.002)
        unchanged = unchanged + 1 if recorder.live == level else 0
        level = recorder.live


def real_recipe(recipe: Recipe, registry: Registry) -> Recipe:
    """Return the recipe without what stands beside a step: monitors, evaluation, checkpoints, compilation.

    Kernels are PyTorch's: those of a CPU would exchange tensors through memory, where nobody sees it.
    """
    kernels = Selection("kernels", "torch", registry.get("kernels", "torch").config())
    return attrs.evolve(
        recipe,
        run=attrs.evolve(recipe.run, weights=None, compile=False, cuda_graphs=False),
        evaluation=attrs.evolve(recipe.evaluation, every=0),
        kernels=kernels,
        monitor=(),
    )


def record_step(recipe: Recipe, registry: Registry, tell: Callable[[str], None] = quiet) -> StepRecord:
    """Train two steps on this rank of a gloo group, and return the second one. Collective.

    ``tell`` is called with what is done next, before each step.
    """
    recorder = Recorder("cpu")
    with recorder, recorder.watching_modules(), recorder.watching_resizes():
        recorder.enter("compose")
        engine = RecordedEngine.from_recipe(recipe, registry=registry, rank=dist.get_rank())
        run = engine.run
        engine.recorder, engine.tell = recorder, tell
        engine.executor = _Executor(recorder, run)
        balance_experts(run)
        state = held_by(run, recorder)
        engine.fit()
    return of_phases(state, engine.phases)


def balance_experts(run: Run) -> None:
    """Have each router send every expert as many tokens as any other, as a plan assumes."""
    whole = {placed.placement.name: placed.placement.global_shape for placed in run.placed}
    for part in run.stages.values():
        numbers = {}
        for name, module, tag in tagged(part):
            if tag.role is Role.EXPERTS:
                weights = (whole[f"{name}.{each}"] for each, _ in module.named_parameters())
                numbers[name.rpartition(".")[0]] = next(weights)[0]
        for name, module, tag in tagged(part):
            if tag.role is Role.ROUTER:
                module.register_forward_hook(partial(_choose_evenly, numbers[name.rpartition(".")[0]]))


def _choose_evenly(experts: int, module: nn.Module, args: Any, routing: Routing) -> None:
    """Change choices in place: another tensor beside what backward saved would count as memory."""
    routing.experts.data.copy_(evenly(routing.experts, experts))


def evenly(chosen_BSK: torch.Tensor, experts: int) -> torch.Tensor:
    """Return other choices of the same shape: each expert's number is that of :func:`shard_range`."""
    total, K = chosen_BSK.numel(), chosen_BSK.shape[-1]
    bounds = [shard_range(total, expert, experts) for expert in range(experts)]
    sizes = torch.tensor([end - begin for begin, end in bounds])
    flat = torch.arange(experts).repeat_interleave(sizes)
    return flat.view(K, -1).T.reshape(chosen_BSK.shape).to(chosen_BSK.device)
