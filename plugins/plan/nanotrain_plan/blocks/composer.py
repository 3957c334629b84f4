"""Plans many layouts of one recipe: blocks are measured once at each set of degrees, stages made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm

import attrs

from nanotrain_core.api import Costs, Layout, Part, PhaseTimeline, Recipe, Registry, Selection
from nanotrain_core.api.torch import Model, Schedule
from nanotrain_plan.advice import with_microbatch
from nanotrain_plan.blocks.measured import Block, Blocks, add_shares, stage_of, tell_apart, together
from nanotrain_plan.blocks.probe import (
    FEW_SPLIT,
    MOST_SPLIT,
    PIPELINE,
    PLAIN,
    Halves,
    NotComposable,
    choose,
    pipeline_parts,
    single_part,
    take_probe,
)
from nanotrain_plan.blocks.schedules import Lists, lists_of
from nanotrain_plan.blocks.stages import MOST_GUESSED, Seconds, SummedPhase, make_step
from nanotrain_plan.budget import HostMemory, host_memory
from nanotrain_plan.comms import CollectiveTime, Links
from nanotrain_plan.dry.phase import Phase
from nanotrain_plan.dry.rank import RankStep, dry_recipe
from nanotrain_plan.hardware import Hardware
from nanotrain_plan.memory import AFTER, RankMemory, all_ranks
from nanotrain_plan.phase_stages import highest_memory, step_of
from nanotrain_plan.run_phases import run_seconds
from nanotrain_plan.stages import Kind, Stages, compiles_layers, kind_of
from nanotrain_plan.timing import StepTime, least_time, step_time


@attrs.define(frozen=True, kw_only=True)
class Estimate:
    """What a layout takes, put together from blocks."""

    memory: list[RankMemory]
    """In the phase with the most tokens in a microbatch, as :attr:`time`."""
    time: StepTime
    peak: int
    """Bytes of the rank with the highest peak, in any phase."""
    host: HostMemory
    seconds: float
    """Of the whole run, as :attr:`~nanotrain_plan.plan.Plan.seconds`."""
    busy: float
    """Of them, those in which pipeline ranks wait for no other, on average; 0 if this is not known."""


@attrs.define(frozen=True)
class Bound:
    """What a layout takes at least."""

    peaks: tuple[int, ...]
    """Bytes of each pipeline rank."""
    seconds: float
    """Of the whole run."""


class Composer:
    """Estimates layouts on one hardware; remembers the blocks it has measured."""

    def __init__(self, registry: Registry, hardware: Hardware) -> None:
        self.registry, self.hardware = registry, hardware
        self._blocks: dict[str, Blocks] = {}
        self._whole: dict[str, Block] = {}
        self._accumulate = registry.get("schedule", "accumulate").config()
        self._parts: dict[str, tuple[Part, ...]] = {}
        self._lists: dict[tuple[str, int, int, bool], Lists] = {}

    def estimate(self, recipe: Recipe, layout: Layout) -> Estimate:
        """Return memory and time of a checked recipe.

        Raises:
            NotComposable: it must be planned in full.
        """
        planned = self.stages(recipe, layout)
        of = self._of_phases(planned)
        highest = highest_memory(recipe, planned, of, self.registry.build(recipe.schedule))
        _expect_known_peaks(planned, highest.ranks)
        memory = list(all_ranks(planned, recipe)) if highest.phase else highest.ranks
        times: dict[int, StepTime] = {}

        def time(now: Recipe) -> StepTime:
            stages = of(now)
            if id(stages) not in times:
                times[id(stages)] = step_time(stages, self.hardware, collective_time)
            return times[id(stages)]

        seconds, busy = run_seconds(
            recipe, layout, lambda now: time(now).seconds, lambda now: busy_seconds(time(now))
        )
        return Estimate(
            memory=memory,
            time=time(planned.recipe),
            peak=max(rank.peak for rank in highest.ranks),
            host=host_memory(recipe, self.registry, planned, self.hardware, highest),
            seconds=seconds,
            busy=busy,
        )

    def bound(self, recipe: Recipe, layout: Layout) -> Bound:
        """Return what a layout takes at least, without measuring W passes apart.

        Weight gradients that have a pass of their own keep tensors until then, and take no less time there.

        Raises:
            NotComposable: it must be planned in full.
        """
        stages = self.stages(recipe, layout, apart=False)
        ranks = list(all_ranks(stages, recipe))
        _expect_known_peaks(stages, ranks)
        peaks = tuple(rank.peak for rank in ranks)
        of = self._of_phases(stages, apart=False)
        (seconds,) = run_seconds(
            recipe, layout, lambda now: least_time(of(now), self.hardware, collective_time)
        )
        return Bound(peaks, seconds)

    def _of_phases(self, planned: Stages, *, apart: bool = True) -> Callable[[Recipe], Stages]:
        """Return what gives the stages of a phase's recipe: the same object for steps that are alike.

        What a phase sets besides its batch changes no step; with it, blocks would be measured again.
        """
        layout, dp = planned.layout, planned.data_ranks
        known = {step_of(planned.recipe, dp): planned}

        def of(now: Recipe) -> Stages:
            step = step_of(now, dp)
            if step not in known:
                recipe = attrs.evolve(planned.recipe, batch=now.batch)
                known[step] = self.stages(recipe, layout, apart=apart, parts=planned.parts)
            return known[step]

        return of

    def stages(
        self, recipe: Recipe, layout: Layout, *, apart: bool = True, parts: tuple[Part, ...] = ()
    ) -> Stages:
        """Return what ranks do in a step of the phase with the largest microbatches: see :func:`dry_stages`.

        Args:
            recipe: checked.
            layout: of the run.
            apart: whether weight gradients that have a pass of their own are computed there.
            parts: stages that another phase of the run has; by default the schedule cuts them.
        """
        recipe = PhaseTimeline(recipe).largest()
        step = step_of(recipe, layout.size(*layout.row_dims))
        recipe = with_microbatch(recipe, step.sequences)
        pp = layout.degree("pp")
        _expect_independent_layers(recipe, pp)
        model: Model = self.registry.build(recipe.model)
        schedule: Schedule = self.registry.build(recipe.schedule)
        costs = model.flops(recipe.batch.length)
        cut = f"{recipe.schedule} {pp} {costs}"
        if not parts and cut not in self._parts:
            self._parts[cut] = tuple(schedule.parts(costs, pp))
        parts = parts or self._parts[cut]
        microbatches = recipe.batch.microbatches(layout.size(*layout.row_dims))
        asked = str(recipe.schedule), pp, microbatches, apart
        if asked not in self._lists:
            self._lists[asked] = lists_of(schedule, pp, microbatches, apart=apart)
        actions, sorts = self._lists[asked].actions, self._lists[asked].sorts
        halves = _halves_of(self._lists[asked], microbatches)
        blocks, whole = self._measure_all(recipe, layout, halves, costs)
        if microbatches == 1:
            blocks, whole = blocks.alone(), whole and whole.alone()
        elif step.last < step.sequences:
            last = with_microbatch(recipe, step.last)
            of_last, whole_of_last = self._measure_all(last, layout, halves, costs)
            blocks = blocks.ending(of_last)
            whole = whole and whole_of_last and whole.ending(whole_of_last)
        seconds = Seconds(Links(self.hardware, layout))
        kinds: dict[Kind, int] = {}
        steps: dict[int, RankStep] = {}
        like = []
        for number in range(pp):
            own = {stage: part for stage, part in enumerate(parts) if part.rank == number}
            kind = kind_of(own, sorts[number], costs)
            if kind not in kinds:
                kinds[kind] = number
                steps[number] = make_step(blocks, own, costs, seconds, whole)
            like.append(kinds[kind])
        return Stages(
            recipe=recipe,
            layout=layout,
            parts=parts,
            costs=costs,
            actions=actions,
            microbatches=microbatches,
            sorts=sorts,
            steps=steps,
            like=like,
            compiled=compiles_layers(recipe, host=self.hardware.gloo),
            captured=recipe.run.cuda_graphs,
        )

    def _measure_all(
        self, recipe: Recipe, layout: Layout, halves: Sequence[Halves], costs: Costs
    ) -> tuple[Blocks, Block | None]:
        """Return blocks with all passes, and without a pipeline the ends of its stage."""
        blocks = together([self._measure(recipe, layout, each, costs) for each in halves])
        if layout.degree("pp") > 1:
            return blocks, None
        return blocks, self._measure_whole(recipe, layout, halves[0], costs, blocks)

    def _measure(self, recipe: Recipe, layout: Layout, halves: Halves, costs: Costs) -> Blocks:
        probing = self._probe_recipe(recipe, layout, halves, pp=PIPELINE)
        key = f"{halves} {probing}"
        if key not in self._blocks:
            parts = pipeline_parts(costs, choose(costs))
            probe = take_probe(probing, self.registry, parts, halves, host=self.hardware.gloo)
            self._blocks[key] = tell_apart(probe, costs)
        return self._blocks[key]

    def _measure_whole(
        self, recipe: Recipe, layout: Layout, halves: Halves, costs: Costs, blocks: Blocks
    ) -> Block:
        """Return embedding and head of a run without a pipeline: a stage of both and a layer, less the layer.

        They may share a parameter.
        """
        probing = self._probe_recipe(recipe, layout, halves, pp=1)
        key = f"{halves} {probing}"
        if key not in self._whole:
            parts = single_part(costs)
            probe = take_probe(probing, self.registry, parts, halves, host=self.hardware.gloo)
            stage = stage_of(probe.steps[0], probe, 0)
            layer = blocks.layers[costs.layers[parts[0].first]]
            self._whole[key] = attrs.evolve(
                stage,
                work={sort: work.plus(layer.work[sort], -1.0) for sort, work in stage.work.items()},
                shares={
                    dims: share if dims not in layer.shares else add_shares(share, layer.shares[dims], -1)
                    for dims, share in stage.shares.items()
                },
            )
        return self._whole[key]

    def _probe_recipe(self, recipe: Recipe, layout: Layout, halves: Halves, *, pp: int) -> Recipe:
        """Return the recipe of a probe: as few data-parallel ranks, and microbatches, as tell the same.

        A stage has twice the ranks that the inner degrees need, so that dp and edp are above 1, unless it has
        just these in the run: then those of dp or edp that are 1 exchange no gradients, and have no buffers.
        """
        dense, experts = layout.degree("tp", "cp"), layout.degree("ep", "etp")
        unit = lcm(dense, experts)
        within = unit if layout.world_size == unit * layout.degree("pp") else 2 * unit
        microbatches = 4 if halves.any else 3
        sequences = microbatches * recipe.batch.microbatch * within // dense
        found = attrs.evolve(
            dry_recipe(recipe, self.registry, host=self.hardware.gloo),
            topology=attrs.evolve(recipe.topology, config=attrs.evolve(recipe.topology.config, pp=pp)),
            batch=attrs.evolve(recipe.batch, sequences=sequences),
            schedule=Selection("schedule", "accumulate", self._accumulate),  # which a probe's replaces
        )
        return attrs.evolve(found, run=attrs.evolve(found.run, ranks=pp * within))


def busy_seconds(time: StepTime) -> float:
    """Return the seconds of a step without those in which pipeline ranks wait, on average."""
    return time.pipeline * (1 - time.bubble) + time.after


def collective_time(phase: Phase) -> CollectiveTime:
    """Return what the collectives of a phase take."""
    assert isinstance(phase, SummedPhase)
    return phase.collective_time


def _halves_of(lists: Lists, microbatches: int) -> list[Halves]:
    """Return the probes that have the passes of a schedule, W passes of the first and the last among them."""
    if not lists.split:
        return [PLAIN]
    stages = {a.stage for own in lists.actions for a in own}
    ends = {(stage, m) in lists.split for stage in stages for m in (0, microbatches - 1)}
    return [probe for probe in (MOST_SPLIT, FEW_SPLIT) if probe.ends in ends]


def _expect_known_peaks(stages: Stages, ranks: Sequence[RankMemory]) -> None:
    """Refuse a layout where temporaries of gradient sync or of the optimizer decide a rank's peak.

    They need not be proportional to what a rank holds: an optimizer may take a few tensors at a time.
    """
    names = {told: name for name, told in AFTER.items()}
    for rank in ranks:
        phase = stages.step_of(rank.pp_rank).around.get(names.get(rank.where, ""))
        if isinstance(phase, SummedPhase) and phase.doubt > MOST_GUESSED * rank.peak:
            raise NotComposable(f"temporaries of the {rank.where} decide the peak")


def _expect_independent_layers(recipe: Recipe, pp: int) -> None:
    for selection in recipe.parallel:
        if getattr(selection.config, "every", 1) != 1:
            raise NotComposable(f"{selection.use}: every {selection.config.every} layers are alike, not each")
        keep = getattr(selection.config, "keep", 0)  # of activation_offload: layers at a stage's end
        measured = 1 if pp == 1 else 0  # a single stage, with its last layer
        if isinstance(keep, int) and keep > measured:
            raise NotComposable(f"{selection.use}: the last layers of a stage are not like the others")
    for selection in (recipe.optimizer, *recipe.parallel):
        config = selection.config
        if getattr(config, "stage", 1) == 2 and not getattr(config, "overlap", True):
            # A stage's gradients are sent, and freed, after its whole pass, and not layer by layer.
            raise NotComposable(f"{selection.use}: a pass keeps the gradients of all layers to its end")
