"""What a sweep of layouts leaves out, how it ranks them, and what it advises."""

from collections import Counter
from types import SimpleNamespace

import attrs
import pytest
from nanotrain_plan.advice import (
    Change,
    advise,
    try_plan,
    with_component,
    with_degree,
    with_microbatch,
    with_zero,
)
from nanotrain_plan.blocks import buffers
from nanotrain_plan.blocks.composer import Composer
from nanotrain_plan.compare import Comparison, Known, _held, as_planned, describe
from nanotrain_plan.grid import Family, _possible, families
from nanotrain_plan.hardware import find_hardware
from nanotrain_plan.sweep import WHOLE, sweep
from planned_layouts import DENSE, SMALL, changed

from nanotrain_core.api import Selection, find_problems, resolve_recipe
from nanotrain_core.layout import buckets


@pytest.fixture
def dense(tmp_path):
    path = tmp_path / "dense.toml"
    path.write_text(DENSE)
    return resolve_recipe(str(path))


#: Of the ten steps four have small microbatches.
PHASES = """
[[phase]]
until_tokens = 100_000
[[phase]]
batch.microbatch = 2
batch.sequences = 128
"""


@pytest.fixture
def with_phases(tmp_path):
    path = tmp_path / "phases.toml"
    path.write_text(DENSE + PHASES)
    return resolve_recipe(str(path))


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_layouts_are_left_out_by_activations_of_no_larger_tp(dense, sequence_parallel):
    """Of as many tokens a rank has more of them where tp is larger: of the inputs that it gathers."""
    (tp,) = dense.recipe.parallel
    tp = attrs.evolve(tp, config=attrs.evolve(tp.config, sequence_parallel=sequence_parallel))
    found = attrs.evolve(dense, recipe=attrs.evolve(dense.recipe, parallel=[tp]))
    small, large, longer = (
        changed(found, pp=pp, tp=tp, microbatch=tp) for pp, tp in ((2, 2), (2, 4), (4, 2))
    )
    plan = SimpleNamespace(hardware=find_hardware("h100"))

    def is_full(recipe, before):
        layout, other = (find_problems(each, dense.registry)[0] for each in (recipe, before))
        known = Known(held=(_held(before, other, 10**12),))
        return Comparison(plan, dense.registry, known, WHOLE)._is_full(recipe, layout)

    assert is_full(small, small)
    assert is_full(large, small)
    assert not is_full(small, large)
    assert not is_full(small, longer)


FEW_SEQUENCES = """
[[phase]]
until_tokens = 50_000
batch.sequences = 8
[[phase]]
batch.sequences = 64
"""


def test_as_many_buckets_have_buffers_as_the_runtime_lends():
    assert buffers.IN_FLIGHT == buckets.DEPTH + 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("pp", "sequences", "microbatch", "phases", "tolerance"),
    [(2, 132, 8, "", 0.02), (1, 64, 4, FEW_SEQUENCES, 0.02)],
    ids=["ragged", "phases"],
)
def test_fewer_sequences_than_a_microbatch_take_less_time(
    tmp_path, pp, sequences, microbatch, phases, tolerance
):
    """33 sequences for each rank in microbatches of 8; and 1, then 8, in microbatches of 4."""
    path = tmp_path / "few.toml"
    text = DENSE.replace("sequences = 64", f"sequences = {sequences}").replace(
        "length = 512", "length = 2048"
    )
    text = text.replace("microbatch = 1", f"microbatch = {microbatch}").replace("width = 256", "width = 2048")
    text = text.replace('use = "zero12"\nbucket_mb = 0.25', 'use = "adamw"')
    if pp == 1:
        text = text.replace("pp = 2", "pp = 1").replace("1f1b", "accumulate")
    path.write_text(text + phases)
    found = resolve_recipe(str(path))
    composer = Composer(found.registry, find_hardware("h100"))
    estimate = composer.estimate(found.recipe, found.layout)
    whole = try_plan(found.recipe, found.registry, composer.hardware)
    assert estimate.seconds == pytest.approx(whole.seconds, rel=tolerance)
    assert estimate.peak == pytest.approx(whole.worst.peak, rel=tolerance)


@pytest.mark.full
@pytest.mark.parametrize("microbatch", [1, 4])
def test_rates_of_a_recipe_with_phases_are_those_of_its_whole_run(with_phases, microbatch):
    """With microbatches of 4 the first phase has the largest, and the recipe's own has the second phase."""
    plan = try_plan(with_phases.recipe, with_phases.registry, find_hardware("h100"))
    recipe = with_microbatch(plan.recipe, microbatch)
    found = Comparison(plan, with_phases.registry, Known(), WHOLE).of(Family(recipe, (2,), most=1))
    ((_, candidate),) = found.layouts
    whole = try_plan(recipe, with_phases.registry, plan.hardware)
    tokens = (4 * 64 + 6 * 128) * 512
    assert [phase.steps for phase in whole.phases] == [4, 6]
    rate = tokens / sum(phase.seconds for phase in whole.phases)
    assert candidate.tokens_per_second == pytest.approx(rate, rel=SMALL)
    mfu = rate * plan.flops.model / 16 / 1e12 / plan.peak_tflops
    assert candidate.mfu == pytest.approx(mfu, rel=SMALL)


@pytest.mark.full
def test_microbatches_that_phases_set_are_not_varied(with_phases):
    plan = try_plan(with_phases.recipe, with_phases.registry, find_hardware("h100"))
    grid = families(plan, with_phases.registry, Counter())
    assert {family.recipe.batch.microbatch for family in grid} == {1}
    assert "microbatch 1 and 2," in describe(plan.recipe, plan.layout)


@pytest.mark.full
def test_layouts_fit_if_their_hosts_have_the_memory_too(dense):
    config = dense.registry.get("parallel", "activation_offload").config(min_mb=0.01)
    offload = Selection("parallel", "activation_offload", config)
    recipe = changed(dense, pp=1, tp=1, schedule="accumulate")
    recipe = attrs.evolve(recipe, parallel=[offload])
    plan = try_plan(recipe, dense.registry, find_hardware("h100"))
    assert plan.host.activations > 10**6
    hardware = attrs.evolve(plan.hardware, host_memory_gb=(plan.host.total + 1000) / 1e9)
    comparison = Comparison(attrs.evolve(plan, hardware=hardware), dense.registry, Known(), WHOLE)
    for size, fits in ((1, True), (2, False)):  # with twice the activations on the host
        layout = with_microbatch(recipe, size)
        whole = try_plan(layout, dense.registry, hardware)
        assert (whole.fits, whole.host.fits, as_planned(whole).fits) == (True, fits, fits)
        host = comparison.composer.estimate(layout, whole.layout).host
        assert host.activations == whole.host.activations
        assert host.checkpoint == pytest.approx(whole.host.checkpoint, rel=0.01)
        found = comparison.of(Family(layout, (1,), most=1))
        assert found.layouts[-1][1].fits is fits


def test_advice_that_is_enough_for_devices_and_hosts_comes_first(dense, monkeypatch):
    plan = try_plan(dense.recipe, dense.registry, find_hardware("h100"))
    less = [attrs.evolve(rank, peak=rank.peak // 2) for rank in plan.memory]
    slow = attrs.evolve(plan, memory=less, time=attrs.evolve(plan.time, seconds=2 * plan.time.seconds))
    fast = attrs.evolve(plan, memory=less, host=attrs.evolve(plan.host, available=0))
    assert fast.fits
    changes = [Change("fast", lambda recipe: fast), Change("slow", lambda recipe: slow)]
    monkeypatch.setattr("nanotrain_plan.advice.changes", lambda *_: changes)
    monkeypatch.setattr("nanotrain_plan.advice.try_plan", lambda planned, *_: planned)
    assert [each.told for each in advise(plan, dense.registry)] == ["slow", "fast"]


def test_advice_is_compared_by_the_rates_of_whole_runs(dense, monkeypatch):
    """Of a recipe with phases changes may plan another: here that of the slower run has the faster step."""
    plan = try_plan(dense.recipe, dense.registry, find_hardware("h100"))
    less = [attrs.evolve(rank, peak=rank.peak // 2) for rank in plan.memory]
    slow, fast = (
        attrs.evolve(
            plan,
            memory=less,
            time=attrs.evolve(plan.time, seconds=step),
            phases=[SimpleNamespace(seconds=seconds)],
        )
        for step, seconds in ((0.5, 20.0), (1.0, 10.0))
    )
    changes = [Change("slow", lambda recipe: slow), Change("fast", lambda recipe: fast)]
    monkeypatch.setattr("nanotrain_plan.advice.changes", lambda *_: changes)
    monkeypatch.setattr("nanotrain_plan.advice.try_plan", lambda planned, *_: planned)
    rates = [(each.told, each.tokens_per_second) for each in advise(plan, dense.registry)]
    assert rates == [("fast", plan.data.tokens / 10.0), ("slow", plan.data.tokens / 20.0)]


@pytest.mark.full
def test_a_sweep_tells_what_it_leaves_out_and_plans_the_best_whole(dense, monkeypatch):
    monkeypatch.setattr("nanotrain_plan.sweep.WHOLE", 1)
    plan = try_plan(dense.recipe, dense.registry, find_hardware("h100"))
    swept = sweep(plan, dense.registry, limit=30, processes=1)
    assert swept.examined == 30
    rates = [each.tokens_per_second for each in swept.candidates if each.fits]
    assert rates == sorted(rates, reverse=True)
    (own,) = [each for each in swept.candidates if "as it is" in each.layout]
    assert (own.peak, own.tokens_per_second) == (plan.worst.peak, plan.tokens_per_second)
    assert swept.candidates[0].planned_in_full
    assert swept.examined >= len(swept.candidates)
    assert all(number > 0 for number in swept.left_out.values())
    assert swept.bounded > swept.left_out["recomputes more than it needs to fit"] > 0
    refused = [
        n for reason, n in swept.left_out.items() if reason.startswith(("refused", "cannot be planned"))
    ]
    assert swept.refused == sum(refused)
    assert swept.planned == swept.examined - swept.refused - swept.bounded > 0


def test_a_sweep_says_why_a_layout_cannot_be_planned(dense, monkeypatch):
    plan = try_plan(dense.recipe, dense.registry, find_hardware("h100"))

    def fail(self, recipe, layout):
        raise NotImplementedError("aten::nonzero needs numbers\nmore of it")

    monkeypatch.setattr(Composer, "estimate", fail)
    swept = sweep(plan, dense.registry, limit=3, processes=1)
    assert swept.left_out["cannot be planned: aten::nonzero needs numbers"] > 0


@pytest.mark.full
def test_layouts_whose_layers_stay_eager_are_marked(dense):
    plans = [
        try_plan(changed(dense, schedule=each), dense.registry, find_hardware("h100"))
        for each in ("1f1b", "zb_h1")
    ]
    assert [as_planned(plan).stays_eager for plan in plans] == [False, True]


@pytest.mark.full
@pytest.mark.parametrize("share", [0.6, 2.0])
def test_bounds_leave_out_no_layout_that_is_among_the_fastest(dense, monkeypatch, share):
    """``share``: memory of a device, over what the recipe takes; with less of it more bounds apply."""
    plan = try_plan(dense.recipe, dense.registry, find_hardware("h100"))
    memory_gb = share * plan.worst.peak / 1e9
    scarce = attrs.evolve(plan.hardware, memory_gb=memory_gb, reserved_gb=0.0)
    plan = try_plan(dense.recipe, dense.registry, scarce)
    bounded = sweep(plan, dense.registry, limit=60, processes=1)
    monkeypatch.setattr("nanotrain_plan.compare.MARGIN", float("inf"))
    monkeypatch.setattr("nanotrain_plan.compare.Comparison._is_full", lambda *_: False)
    monkeypatch.setattr("nanotrain_plan.compare.Comparison._is_slow", lambda *_: False)
    monkeypatch.setattr("nanotrain_plan.compare.Comparison._least", lambda *_: 0.0)
    exhaustive = sweep(plan, dense.registry, limit=60, processes=1)
    assert exhaustive.planned > bounded.planned
    assert exhaustive.examined == bounded.examined
    fastest = [[each for each in found.candidates if each.fits][:WHOLE] for found in (bounded, exhaustive)]
    assert fastest[0] == fastest[1]


@pytest.mark.full
def test_a_sweep_of_a_recipe_with_larger_tp_has_the_layout_without(dense, monkeypatch):
    """Its activations are fewer than those of the recipe, of as many tokens in a microbatch of a rank."""
    monkeypatch.setattr("nanotrain_plan.grid.MICROBATCHES", (1, 8))
    monkeypatch.setattr("nanotrain_plan.grid.GRANULARITIES", (None,))
    (tp,) = dense.recipe.parallel
    tp = attrs.evolve(tp, config=attrs.evolve(tp.config, sequence_parallel=True))
    recipe = attrs.evolve(dense.recipe, parallel=[tp], run=attrs.evolve(dense.recipe.run, ranks=8))
    recipe = with_component(recipe, dense.registry, "optimizer", "sgd")
    recipe = attrs.evolve(recipe, batch=attrs.evolve(recipe.batch, sequences=8, length=4096))
    found = attrs.evolve(dense, recipe=recipe)
    own, other = (
        changed(found, pp=1, tp=degree, microbatch=degree, schedule="accumulate") for degree in (8, 1)
    )
    hardware = find_hardware("h100")
    memory_gb = 1.02 * try_plan(other, dense.registry, hardware).worst.peak / 1e9
    scarce = attrs.evolve(hardware, memory_gb=memory_gb, reserved_gb=0.0)
    plan = try_plan(own, dense.registry, scarce)
    assert not plan.fits
    best = sweep(plan, dense.registry, 500, processes=1).candidates[0]
    assert (best.layout, best.fits) == ("dp 8, microbatch 1, no recompute, sgd", True)


@pytest.mark.full
def test_gradients_that_a_wrapper_shards_need_not_fit(dense):
    """With ``zero12`` beside ``adamw`` in stage 2, weights alone fit where gradients beside them do not."""
    config = dense.registry.get("parallel", "zero12").config(stage=2)
    sharded = Selection("parallel", "zero12", config)
    recipe = with_component(dense.recipe, dense.registry, "optimizer", "adamw")
    recipe = attrs.evolve(recipe, parallel=(*recipe.parallel, sharded))
    plan = try_plan(recipe, dense.registry, find_hardware("h100"))
    held = 2 * plan.parameters.total / 2  # bfloat16, of two tp ranks
    memory = (1.5 * held) / 1e9 + plan.hardware.reserved_gb
    plan = attrs.evolve(plan, hardware=attrs.evolve(plan.hardware, memory_gb=memory))
    assert _possible(plan, recipe, 1, dense.registry, Counter())
    whole = attrs.evolve(recipe, parallel=dense.recipe.parallel)
    assert not _possible(plan, whole, 1, dense.registry, Counter())


@pytest.fixture
def sharded(dense):
    """The same with ``fsdp2``, on 8 data-parallel ranks."""
    recipe = changed(dense, pp=1, schedule="accumulate")
    recipe = with_component(recipe, dense.registry, "optimizer", "adamw")
    wrapper = Selection("parallel", "fsdp2", dense.registry.get("parallel", "fsdp2").config())
    recipe = attrs.evolve(recipe, parallel=(*recipe.parallel, wrapper))
    return attrs.evolve(dense, recipe=recipe)


def test_weights_in_shards_need_not_fit_whole(sharded):
    """An eighth of them does, and a half with ``dp_shard``."""
    registry = sharded.registry
    plan = try_plan(sharded.recipe, registry, find_hardware("h100"))
    whole = (2 + 4) * plan.parameters.total / 2  # bfloat16, gradients in float32, of two tp ranks
    memory = 0.3 * whole / 1e9 + plan.hardware.reserved_gb
    plan = attrs.evolve(plan, hardware=attrs.evolve(plan.hardware, memory_gb=memory))
    for shard, fits in ((None, True), (4, True), (2, False)):
        recipe = with_degree(sharded.recipe, registry, "dp_shard", shard)
        assert _possible(plan, recipe, 1, registry, Counter()) is fits
    assert not _possible(plan, with_zero(sharded.recipe, registry, 1), 1, registry, Counter())


def test_groups_that_share_weights_are_varied_where_a_wrapper_has_them(dense, sharded):
    """Of 8 ranks, 2 or 4; and all of them, which is without ``dp_shard``, and what ZeRO needs."""

    def compared(found):
        plan = try_plan(found.recipe, found.registry, find_hardware("h100"))
        refused = Counter()
        grid = families(plan, found.registry, refused)
        assert grid[0].recipe == found.recipe
        ranks = found.recipe.topology.config.pp
        return {
            (each.topology.config.dp_shard, each.optimizer.use)
            for each in (family.recipe for family in grid if ranks in family.pipelines)
            if each.topology.config.tp == 2 and not find_problems(each, found.registry)[1]
        }

    assert compared(dense) == {(None, "zero12")}
    everything = {(None, "adamw"), (2, "adamw"), (4, "adamw"), (None, "zero12")}
    assert compared(sharded) == everything
    hybrid = with_degree(sharded.recipe, sharded.registry, "dp_shard", 2)
    assert compared(attrs.evolve(sharded, recipe=hybrid)) == everything
    told = with_degree(sharded.recipe, sharded.registry, "dp_shard", 8)  # the same as without
    assert compared(attrs.evolve(sharded, recipe=told)) == everything - {(None, "adamw")} | {(8, "adamw")}
