"""Batches that ranks or microbatches cannot split evenly."""

import pytest
from nanotrain_plan.hardware import find_hardware
from nanotrain_plan.plan import make_plan, to_json

from nanotrain_core.api import NanotrainError, PhaseTimeline, resolve_recipe

RECIPE = """
[run]
steps = 20
ranks = {ranks}
[batch]
sequences = {sequences}
microbatch = {microbatch}
length = 2048
[model]
use = "transformer"
layers = 2
width = 512
heads = 4
vocab = 1024
[precision]
use = "bf16"
[data]
use = "synthetic"
vocab = 256
"""


@pytest.fixture
def plan(tmp_path):
    def plan_of(sequences, microbatch, *, ranks=1, more="", **changes):
        if "schedule" in more:
            pytest.importorskip("nanotrain_pp_1f1b")
        path = tmp_path / "recipe.toml"
        text = RECIPE.format(sequences=sequences, microbatch=microbatch, ranks=ranks)
        path.write_text(text + more)
        sets = [f"{key.replace('__', '.')}={value}" for key, value in changes.items()]
        found = resolve_recipe(str(path), overrides=sets)
        return make_plan(found.recipe, found.registry, found.layout, find_hardware("h100"))

    return plan_of


def test_a_step_takes_as_long_and_as_much_as_on_the_ranks_with_most_sequences(plan):
    """Of 7 sequences the first of 4 ranks has one and the others two."""
    uneven, even = plan(7, 8, ranks=4), plan(8, 8, ranks=4)
    assert uneven.time.seconds == even.time.seconds
    assert uneven.worst.peak == even.worst.peak
    assert uneven.executed == pytest.approx(even.executed)  # of a token
    told = to_json(uneven)["time"]
    assert told["mfu"] < told["hfu"]


def test_a_last_microbatch_of_fewer_sequences_takes_less_time(plan):
    four, one, five = plan(4, 4), plan(1, 4), plan(5, 4)
    assert five.time.pipeline == pytest.approx(four.time.pipeline + one.time.pipeline, rel=0.03)
    assert five.time.busiest.total == pytest.approx(five.time.pipeline)
    assert five.time.pipeline < 0.8 * plan(8, 4).time.pipeline


PIPELINE = """
[topology]
pp = 2
[schedule]
use = "{schedule}"
"""


def test_in_a_pipeline_a_last_microbatch_of_one_sequence_takes_as_long_as_any_of_one(plan):
    more = PIPELINE.format(schedule="1f1b")
    uneven, ones = (plan(*batch, ranks=2, more=more).time for batch in ((13, 4), (4, 1)))
    last, alone = (
        {
            (slot.action.kind, slot.action.stage): slot.end - slot.start
            for row in time.timeline.rows
            for slot in row
            if slot.action.microbatch == 3
        }
        for time in (uneven, ones)
    )
    assert last == pytest.approx(alone)


@pytest.mark.parametrize("pp", [2, 4])
def test_a_whole_backward_pass_takes_as_long_as_its_halves(plan, pp):
    """DualPipe-V has some stages whose first and last microbatches alone have W passes."""
    more = PIPELINE.format(schedule="dualpipe_v").replace("pp = 2", f"pp = {pp}")
    time = plan(16, 1, ranks=pp, more=more, model__layers=2 * pp).time
    seconds: dict = {}
    for row in time.timeline.rows:
        assert sum(slot.end - slot.start for slot in row) <= time.busiest.total * (1 + 1e-9)
        split = {(s.action.stage, s.action.microbatch) for s in row if s.action.kind == "W"}
        for slot in row:
            if slot.action.microbatch == 0:  # writes gradients, to which others add
                continue
            key = slot.action.stage, slot.action.kind, (slot.action.stage, slot.action.microbatch) in split
            seconds.setdefault(key, slot.end - slot.start)
    both = [stage for stage in range(2 * pp) if {(stage, "B", True), (stage, "B", False)} <= {*seconds}]
    assert both
    halves = [seconds[stage, "B", True] for stage in range(1, 2 * pp - 1)]  # of a layer each
    assert halves == pytest.approx([halves[0]] * len(halves), rel=0.1)
    for stage in both:
        parts = seconds[stage, "B", True] + seconds[stage, "W", True]
        assert parts == pytest.approx(seconds[stage, "B", False], rel=0.1)


RAMP = """
[[phase]]
name = "ramp"
until_tokens = 200_000
batch.sequences = {start = 2, end = 24, by = 2}
[[phase]]
name = "rest"
"""


@pytest.mark.full
def test_a_phase_with_less_than_a_microbatch_takes_as_long_as_by_itself(plan):
    ramp = plan(24, 8, ranks=2, more=RAMP)
    alone = {size: plan(size, 8, ranks=2).time.seconds for size in range(2, 26, 2)}
    first, last = ramp.phases[0].sequences
    assert ramp.phases[0].step == pytest.approx((alone[first], alone[last]))
    stretches = [each for each in PhaseTimeline(ramp.recipe).stretches(20) if each.phase == 0]
    seconds = sum(each.steps * alone[each.sequences] for each in stretches)
    assert ramp.phases[0].seconds == pytest.approx(seconds, rel=0.03)


MORE_PASSES = """
[[phase]]
until_tokens = 50_000
batch.length = 512
batch.sequences = {start = 4, end = 16, by = 1}
[[phase]]
batch.length = 2048
batch.sequences = 16
"""


def test_a_phase_may_grow_into_a_schedule_with_more_w_passes(plan):
    """DualPipe-V with 4 microbatches on 4 ranks has stages without W passes; the phase begins so."""
    more = PIPELINE.format(schedule="dualpipe_v").replace("pp = 2", "pp = 4")
    sizes = {"batch__length": 2048, "model__layers": 8}
    phase = plan(16, 1, ranks=4, more=more + MORE_PASSES, **sizes).phases[0]
    short = {**sizes, "batch__length": 512}
    alone = [plan(size, 1, ranks=4, more=more, **short).time.seconds for size in phase.sequences]
    assert phase.step == pytest.approx(alone, rel=0.01)


GROWING = """
[[phase]]
name = "growing"
until_tokens = 400_000
batch.sequences = {start = 8, end = 16, by = 1}
"""


@pytest.mark.full
def test_a_growing_batch_may_need_most_memory_between_its_ends(plan):
    """Interleaved stages hold most with microbatches that are no multiple of the pipeline ranks: 11, on 4."""
    more = PIPELINE.format(schedule="interleaved_1f1b").replace("pp = 2", "pp = 4")
    growing = plan(8, 1, ranks=4, more=more + GROWING, model__layers=8)
    peaks = {size: plan(size, 1, ranks=4, more=more, model__layers=8).worst.peak for size in (8, 11, 16)}
    assert peaks[11] > 1.05 * max(peaks[8], peaks[16])
    assert (growing.worst.peak, growing.memory_phase) == (peaks[11], "growing")


@pytest.mark.parametrize(
    ("in_flight", "told"),
    [
        (lambda pp, count: 1 // 0, "raised ZeroDivisionError: integer division or modulo by zero"),
        (lambda pp, count: 3, "returned 3; expected a number for each pipeline rank"),
        (lambda pp, count: (1,), r"returned \(1,\); expected a number for each pipeline rank"),
    ],
    ids=["raises", "one number", "too few"],
)
def test_a_schedule_that_cannot_say_what_it_holds_is_named(plan, monkeypatch, in_flight, told):
    components = pytest.importorskip("nanotrain_pp_1f1b.components")
    monkeypatch.setattr(components.Interleaved, "in_flight", staticmethod(in_flight))
    more = PIPELINE.format(schedule="interleaved_1f1b").replace("pp = 2", "pp = 4")
    with pytest.raises(NanotrainError, match=rf"^interleaved_1f1b: in_flight\(4, 8\) {told}"):
        plan(8, 1, ranks=4, more=more + GROWING, model__layers=8)
