"""A schedule runs every microbatch through every stage once, in an order without deadlock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

from nanotrain_core.component import Support
from nanotrain_core.contracts import SaysInFlight, Schedule
from nanotrain_core.pipeline.actions import Action, Costs, Part
from nanotrain_core.pipeline.simulator import peak
from nanotrain_core.testing.case import TINY, Case, Tables
from nanotrain_core.testing.checks import check
from nanotrain_core.testing.checks.parallel import assert_same_reports, one_process
from nanotrain_core.testing.compare import EXACT, assert_same, whole
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import train


def pipeline_of(case: Case) -> int:
    """Return the number of pipeline ranks."""
    return case.topology.get("pp", 1)


def schedule_of(case: Case) -> Schedule:
    """Build the schedule."""
    schedule: Schedule = case.build()
    return schedule


def microbatch_counts(case: Case) -> list[int]:
    """Return numbers of microbatches to train with: fewer than stages, as many, and many more."""
    p = pipeline_of(case)
    return _admitted(case, {1, max(1, p - 1), p, 2 * p + 1, 18})


def many_microbatches(case: Case) -> list[int]:
    """Return more numbers, for checks without training."""
    return _admitted(case, {*microbatch_counts(case), 2, 3, 5, 16, 17, 33, 130})


def _admitted(case: Case, counts: Set[int]) -> list[int]:
    """Return the ``counts`` for which the schedule exists: all, unless the component declares otherwise."""
    if case.supported("any_microbatches") is Support.FULL:
        return sorted(counts)
    found = [count for count in sorted(counts) if _exists(case, count)]
    assert found, f"actions refuses all of {sorted(counts)} microbatches: expected a schedule for some"
    return found


def _exists(case: Case, count: int) -> bool:
    try:
        schedule_of(case).actions(pipeline_of(case), count)
    except ValueError:
        return False
    return True


def stages_of(case: Case) -> list[list[int]]:
    """Return the stage numbers that each pipeline rank holds."""
    parts = schedule_of(case).parts(Costs.alike(_layers(case)), pipeline_of(case))
    return [[s for s, part in enumerate(parts) if part.rank == rank] for rank in range(pipeline_of(case))]


def _layers(case: Case) -> int:
    return 8 * pipeline_of(case)


@check("schedule", since="0.1")
def parts_cover_the_layers(case: Case) -> None:
    """The parts are consecutive and hold every layer once, whatever the costs, the ends at the ends."""
    layers = _layers(case)
    for costs in (Costs.alike(layers), _uneven(layers)):
        _assert_covered(schedule_of(case).parts(costs, pipeline_of(case)), layers, pipeline_of(case))


def _uneven(layers: int) -> Costs:
    """Return costs of cheap layers, then expensive ones, and of a head as expensive as several."""
    return Costs(layers=(1.0, 1.0, *[2.5] * (layers - 2)), head=7.0)


def _assert_covered(parts: Sequence[Part], layers: int, pp: int) -> None:
    held: list[int] = []
    for stage, part in enumerate(parts):
        assert part.has_embedding == (stage == 0), f"stage {stage}: {part}: the first has the embedding"
        assert part.has_head == (stage == len(parts) - 1), f"stage {stage}: {part}: the last has the head"
        assert 0 <= part.rank < pp, f"stage {stage}: {part}: no such pipeline rank"
        held += range(part.first, part.last)
    assert held == list(range(layers)), f"of layers 0 to {layers - 1} the parts hold {held}"


@check("schedule", since="0.1")
def every_pass_happens_once(case: Case) -> None:
    """A stage has exactly one F and one B for each microbatch, at most one W, on the rank that holds it."""
    for count in many_microbatches(case):
        lists = schedule_of(case).actions(pipeline_of(case), count)
        for rank, (actions, stages) in enumerate(zip(lists, stages_of(case), strict=True)):
            found = Counter(actions)
            wanted = {Action(kind, s, m) for kind in ("F", "B") for s in stages for m in range(count)}
            missing = sorted(map(str, wanted - found.keys()))
            assert not missing, f"rank {rank}, {count} microbatches: missing {missing}"
            surplus = [str(a) for a, n in found.items() if n > 1 or (a.kind != "W" and a not in wanted)]
            assert not surplus, f"rank {rank}, {count} microbatches: more than once or not its own: {surplus}"


@check("schedule", since="0.1")
def every_rank_gets_the_same(case: Case) -> None:
    """Called again, or on another object, it returns the same lists: each rank builds its own."""
    one, other = schedule_of(case), schedule_of(case)
    for count in many_microbatches(case):
        first = one.actions(pipeline_of(case), count)
        for again in (one, other):
            same = again.actions(pipeline_of(case), count) == first
            assert same, f"{count} microbatches: other actions when asked once more"


@check("schedule", since="0.1")
def order_can_run_to_the_end(case: Case) -> None:
    """Every action has its inputs: F the previous stage, B its own F and the next stage, W its own B."""
    last = max(stage for mine in stages_of(case) for stage in mine)
    for count in many_microbatches(case):
        queues = [list(mine) for mine in schedule_of(case).actions(pipeline_of(case), count)]
        done: set[Action] = set()
        while any(queues):
            ready = [queue for queue in queues if queue and _needs(queue[0], last) <= done]
            stuck = [str(queue[0]) for queue in queues if queue]
            assert ready, f"{count} microbatches: no rank can go on; they wait to run {stuck}"
            for queue in ready:
                done.add(queue.pop(0))


def _needs(action: Action, last: int) -> set[Action]:
    stage, m = action.stage, action.microbatch
    if action.kind == "F":
        return {Action("F", stage - 1, m)} if stage else set()
    if action.kind == "W":
        return {Action("B", stage, m)}
    return {Action("F", stage, m)} | ({Action("B", stage + 1, m)} if stage < last else set())


@check("schedule", since="0.1")
def gradients_equal(case: Case) -> None:
    """Loss, gradients and norm equal those of one process that takes the whole batch at once."""
    data_ranks = case.world_size // pipeline_of(case)
    layers = max(2 * pipeline_of(case), sum(map(len, stages_of(case))))
    for count in microbatch_counts(case):
        sequences = count * data_ranks
        batch = {"sequences": sequences, "microbatch": 1}
        changes: Tables = {"batch": batch, "model": {"layers": layers}, "run": {"steps": 1}}
        if sequences > TINY["data"]["sequences"]:  # of which a batch needs as many
            changes["data"] = {"sequences": sequences}
        ranks = run_ranks(train, case.world_size, case, changes)
        alone = one_process(case, **{**changes, "batch": {**batch, "microbatch": sequences}})
        what = f"gradients with {count} microbatches"
        assert_same(whole([t.gradients for t in ranks]), whole([alone.gradients]), what)
        for trace in ranks:
            assert_same_reports(trace, alone, atol=EXACT)


@check("schedule", since="0.1")
def edges_keep_one_order(case: Case) -> None:
    """Both ends of an edge between stages run its microbatches in one order: NCCL has no tags."""
    last = max(stage for mine in stages_of(case) for stage in mine)
    for count in many_microbatches(case):
        lists = schedule_of(case).actions(pipeline_of(case), count)
        for kind in ("F", "B"):
            orders = [
                [a.microbatch for mine in lists for a in mine if (a.kind, a.stage) == (kind, stage)]
                for stage in range(last + 1)
            ]
            assert all(order == orders[0] for order in orders), f"{count} microbatches: {kind} runs {orders}"


@check("schedule", since="0.2", promise="uneven_layers")
def any_number_of_layers_is_cut(case: Case) -> None:
    """From one layer per stage on, any number is split into stages, with equal or unequal costs."""
    pp, stages = pipeline_of(case), sum(map(len, stages_of(case)))
    for layers in range(stages, 3 * stages + 2):
        for costs in (Costs.alike(layers), _uneven(layers) if layers > 2 else Costs.alike(layers)):
            try:
                parts = schedule_of(case).parts(costs, pp)
            except ValueError as error:
                raise AssertionError(
                    f"{layers} layers on {pp} ranks, {stages} stages, are refused: {error}; if it cannot do "
                    'that, say so: Component(supports={"uneven_layers": Support.NOT_IMPLEMENTED})'
                ) from None
            _assert_covered(parts, layers, pp)


@check("schedule", since="0.2", promise="uneven_layers")
def uneven_stages_train_alike(case: Case) -> None:
    """With one layer more than divides evenly, gradients are those of one process."""
    stages = sum(map(len, stages_of(case)))
    if stages == 1:
        return
    count = 3 if 3 in many_microbatches(case) else microbatch_counts(case)[-1]
    sequences = count * case.world_size // pipeline_of(case)
    changes = {
        "model": {"layers": 2 * stages + 1},
        "batch": {"sequences": sequences, "microbatch": 1},
        "run": {"steps": 1},
    }
    ranks, alone = run_ranks(train, case.world_size, case, changes), one_process(case, **changes)
    assert_same(whole([t.gradients for t in ranks]), whole([alone.gradients]), "gradients")


@check("schedule", since="0.2", applies=lambda case: isinstance(schedule_of(case), SaysInFlight))
def holds_no_more_than_it_says(case: Case) -> None:
    """No rank holds more forward passes between F and B, or W, than ``in_flight`` declares."""
    schedule, pp = schedule_of(case), pipeline_of(case)
    assert isinstance(schedule, SaysInFlight)
    for count in many_microbatches(case):
        said, lists = schedule.in_flight(pp, count), schedule.actions(pp, count)
        assert len(said) == pp, f"in_flight({pp}, {count}) returns {said}; expected a number for each rank"
        for rank, actions in enumerate(lists):
            held = peak(actions)
            assert held <= said[rank], (
                f"{count} microbatches: rank {rank} holds {held}, and says {said[rank]}"
            )
