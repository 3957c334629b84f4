"""Layouts that are put together from blocks, against plans of the same layouts."""

import attrs
import pytest
import torch
from nanotrain_plan.advice import (
    try_plan,
    with_degree,
)
from nanotrain_plan.blocks.composer import Composer
from nanotrain_plan.blocks.probe import NotComposable, choose
from nanotrain_plan.compare import Comparison, Known
from nanotrain_plan.dry.operators import key_of
from nanotrain_plan.grid import Family
from nanotrain_plan.hardware import find_hardware
from planned_layouts import DENSE, SMALL, changed

from nanotrain_core.api import Costs, Selection, find_problems, resolve_recipe


@pytest.fixture
def dense(tmp_path):
    path = tmp_path / "dense.toml"
    path.write_text(DENSE)
    return resolve_recipe(str(path))


def assert_as_planned_whole(found, hardware, changes, tolerance=0.015):
    composer = Composer(found.registry, find_hardware(hardware))
    for change in changes:
        recipe = changed(found, **change)
        layout, problems = find_problems(recipe, found.registry)
        assert not problems, change
        estimate = composer.estimate(recipe, layout)
        whole = try_plan(recipe, found.registry, composer.hardware)
        assert estimate.time.seconds == pytest.approx(whole.time.seconds, rel=tolerance), change
        assert estimate.peak == pytest.approx(whole.worst.peak, rel=tolerance), change


def test_blocks_make_the_layouts_that_are_planned_whole(dense):
    assert_as_planned_whole(dense, "h100", [{}, {"pp": 4, "schedule": "zb_h1"}], SMALL)


@pytest.fixture
def ring(dense):
    config = dense.registry.get("parallel", "cp").config(communication="ring")
    wrappers = (*dense.recipe.parallel, Selection("parallel", "cp", config))
    return attrs.evolve(dense, recipe=attrs.evolve(dense.recipe, parallel=wrappers))


def test_more_ranks_share_sequences_by_the_wrapper_that_a_recipe_has(ring):
    recipe = with_degree(ring.recipe, ring.registry, "cp", 4)
    assert (recipe.topology.config.cp, recipe.parallel) == (4, ring.recipe.parallel)


@pytest.mark.full
def test_blocks_of_ring_attention_make_the_layouts_that_are_planned_whole(ring):
    assert_as_planned_whole(ring, "h100", [{"cp": 2}, {"cp": 4, "pp": 1, "schedule": "accumulate"}], SMALL)


DDP = """
[[parallel]]
use = "ddp"
[optimizer]
use = "adamw"
"""


@pytest.mark.full_cases(
    '8-2-dualpipe_v-4-\\n[[parallel]]\\nuse = "ddp"\\n[optimizer]\\nuse = "adamw"\\n',
    '8-1-accumulate-2-\\n[[parallel]]\\nuse = "ddp"\\n[optimizer]\\nuse = "adamw"\\n',
)
@pytest.mark.parametrize(
    ("dp", "pp", "schedule", "microbatches", "sync"),
    [
        (8, 1, "accumulate", 2, DDP),
        (8, 4, "1f1b", 1, DDP),
        (8, 2, "dualpipe_v", 4, DDP),
        (1, 2, "1f1b", 4, DDP),
        (8, 2, "1f1b", 1, '[optimizer]\nuse = "zero12"\n'),
        (8, 2, "1f1b", 3, '[optimizer]\nuse = "adamw"\n'),
    ],
)
def test_few_microbatches_sync_gradients_as_in_a_whole_plan(tmp_path, dp, pp, schedule, microbatches, sync):
    text = (
        DENSE.replace("tp = 2", "").replace('[[parallel]]\nuse = "tp"\n', "").replace("pp = 2", f"pp = {pp}")
    )
    text = text.replace('[optimizer]\nuse = "zero12"\nbucket_mb = 0.25\n', sync)
    text = text.replace("ranks = 16", f"ranks = {dp * pp}").replace("width = 256", "width = 1024")
    text = text.replace("sequences = 64", f"sequences = {dp * microbatches}").replace("1f1b", schedule)
    path = tmp_path / "few.toml"
    path.write_text(text.replace("length = 512", "length = 1024"))
    found = resolve_recipe(str(path))
    composer = Composer(found.registry, find_hardware("h100"))
    estimate = composer.estimate(found.recipe, found.layout)
    whole = try_plan(found.recipe, found.registry, composer.hardware)
    assert estimate.seconds == pytest.approx(whole.seconds, rel=0.06)
    # Of zero12, gradients wait until a bucket is full, which takes other layers in a probe than in a stage.
    assert estimate.peak == pytest.approx(whole.worst.peak, rel=0.02 if "zero12" in sync else 0.01)


def test_operators_are_remembered_apart_by_default_dtype():
    add = torch.ops.aten.add.Tensor
    before, key = torch.get_default_dtype(), key_of(add, (torch.empty(2, device="meta"), 1), {})
    torch.set_default_dtype(torch.float64)
    try:
        assert key_of(add, (torch.empty(2, dtype=torch.float32, device="meta"), 1), {}) != key
    finally:
        torch.set_default_dtype(before)


UPDATES = {
    "int8": ('[optimizer]\nuse = "adamw"\nmoment_dtype = "int8"\n', "bf16"),
    "ranges": ('[optimizer]\nuse = "zero12"\nbucket_mb = 0.25\nmoment_dtype = "bfloat16"\n', "bf16"),
    "muon": ('[optimizer]\nuse = "muon"\n', "bf16"),
    "fp4": ('[optimizer]\nuse = "adamw"\n', "fp4_master"),
    "average": ('[optimizer]\nuse = "adamw"\nema_decay = 0.99\n', "fp16"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", UPDATES)
def test_rows_of_a_sweep_are_plans_whatever_an_update_takes(tmp_path, name):
    """Few tokens: a step's peak is in its update, whose temporaries do not grow with the number of layers.

    State per element is that of each parameter: Muon has one momentum of matrices, and AdamW's two of others.
    """
    optimizer, precision = UPDATES[name]
    text = DENSE.replace('[optimizer]\nuse = "zero12"\nbucket_mb = 0.25\n', optimizer)
    text = text.replace("width = 256", "width = 512").replace("layers = 8", "layers = 16")
    text = text.replace("length = 512", "length = 32").replace('"bf16"', f'"{precision}"')
    path = tmp_path / "update.toml"
    path.write_text(text)
    found = resolve_recipe(str(path))
    plan = try_plan(found.recipe, found.registry, find_hardware("h100"))
    rows = Comparison(plan, found.registry, Known(), 99)
    for pp, tp, schedule in ((1, 1, "accumulate"), (4, 1, "1f1b"), (4, 4, "1f1b")):  # the last one of dp 1
        recipe = changed(found, pp=pp, tp=tp, schedule=schedule)
        ((_, row),) = rows.of(Family(recipe, (pp,), most=1)).layouts[-1:]
        whole = try_plan(recipe, found.registry, plan.hardware)
        assert row.peak == pytest.approx(whole.worst.peak, rel=0.01)
        assert row.tokens_per_second == pytest.approx(whole.tokens_per_second, rel=SMALL)


def test_a_pipeline_with_offloaded_activations_is_planned_whole(dense):
    config = dense.registry.get("parallel", "activation_offload").config(min_mb=0.01)
    offload = Selection("parallel", "activation_offload", config)
    recipe = attrs.evolve(dense.recipe, parallel=[*dense.recipe.parallel, offload])
    layout, problems = find_problems(recipe, dense.registry)
    assert not problems
    with pytest.raises(NotComposable, match="last layers of a stage"):
        Composer(dense.registry, find_hardware("h100")).estimate(recipe, layout)


def test_adapters_are_composed_as_in_a_whole_plan_though_some_stages_have_no_layer_for_them(dense):
    lora = Selection("parallel", "lora", dense.registry.get("parallel", "lora").config(rank=16))
    adamw = Selection("optimizer", "adamw", dense.registry.get("optimizer", "adamw").config())
    recipe = attrs.evolve(dense.recipe, parallel=[*dense.recipe.parallel, lora], optimizer=adamw)
    layout, problems = find_problems(recipe, dense.registry)
    assert not problems
    composer = Composer(dense.registry, find_hardware("h100"))
    estimate, whole = composer.estimate(recipe, layout), try_plan(recipe, dense.registry, composer.hardware)
    assert estimate.seconds == pytest.approx(whole.seconds, rel=0.02)
    assert estimate.peak == pytest.approx(whole.worst.peak, rel=0.01)


@pytest.mark.parametrize(
    ("shard", "why"),
    [
        (None, "weights are sharded over data-parallel ranks"),
        (2, "weights are sharded over data-parallel ranks"),
        (4, "do not fit .topology.: .* dp_shard 4"),
    ],
)
def test_weights_in_shards_are_planned_whole(dense, shard, why):
    sharded = Selection("parallel", "fsdp2", dense.registry.get("parallel", "fsdp2").config())
    adamw = Selection("optimizer", "adamw", dense.registry.get("optimizer", "adamw").config())
    config = attrs.evolve(dense.recipe.topology.config, dp_shard=shard)
    topology = attrs.evolve(dense.recipe.topology, config=config)
    parallel = (*dense.recipe.parallel, sharded)
    recipe = attrs.evolve(dense.recipe, parallel=parallel, optimizer=adamw, topology=topology)
    layout, problems = find_problems(recipe, dense.registry)
    assert not problems
    with pytest.raises(NotComposable, match=why):
        Composer(dense.registry, find_hardware("h100")).estimate(recipe, layout)


def test_zero2_takes_no_more_memory_with_more_microbatches(dense):
    """Those after the first find the buffers of gradient sync, and end where they began."""
    recipe = changed(dense, tp=1, stage=2)
    layout, problems = find_problems(recipe, dense.registry)
    assert not problems
    composer = Composer(dense.registry, find_hardware("h100"))
    batches = (attrs.evolve(recipe.batch, sequences=size) for size in (64, 1024))
    few, many = (composer.estimate(attrs.evolve(recipe, batch=batch), layout).peak for batch in batches)
    assert few == many
    assert few == pytest.approx(try_plan(recipe, dense.registry, composer.hardware).worst.peak, rel=0.02)


def test_gradients_that_are_sent_after_a_whole_pass_are_planned_whole(dense):
    config = attrs.evolve(dense.recipe.optimizer.config, stage=2, overlap=False)
    recipe = attrs.evolve(dense.recipe, optimizer=attrs.evolve(dense.recipe.optimizer, config=config))
    layout, problems = find_problems(recipe, dense.registry)
    assert not problems
    with pytest.raises(NotComposable, match="gradients of all layers"):
        Composer(dense.registry, find_hardware("h100")).estimate(recipe, layout)


def test_layers_smaller_than_a_bucket_are_planned_whole(dense):
    config = attrs.evolve(dense.recipe.optimizer.config, bucket_mb=25.0)
    recipe = attrs.evolve(dense.recipe, optimizer=attrs.evolve(dense.recipe.optimizer, config=config))
    layout, problems = find_problems(recipe, dense.registry)
    assert not problems
    with pytest.raises(NotComposable, match="smaller than a bucket"):
        Composer(dense.registry, find_hardware("h100")).estimate(recipe, layout)


@pytest.mark.full
def test_optimizer_state_on_the_host_is_on_no_device(dense):
    config = attrs.evolve(dense.recipe.optimizer.config, offload=True)
    offloads = attrs.evolve(dense.recipe.optimizer, config=config)
    found = attrs.evolve(dense, recipe=attrs.evolve(dense.recipe, optimizer=offloads))
    assert_as_planned_whole(found, "h100", [{}], SMALL)


@pytest.mark.full
@pytest.mark.parametrize(
    "change",
    [
        {"pp": 8, "tp": 1},
        {"pp": 1, "schedule": "accumulate"},
        {"microbatch": 2, "recompute": "selective"},
        {"recompute": "selective", "stage": 2},
        {"recompute": "full", "schedule": "interleaved_1f1b"},
    ],
    ids=str,
)
def test_blocks_of_a_small_model(dense, change):
    assert_as_planned_whole(dense, "h100", [change], SMALL)


@pytest.mark.full
def test_blocks_of_v3():
    changes = [
        {"schedule": "1f1b"},
        {"pp": 8, "tp": 4, "schedule": "1f1b"},
        {"tp": 2, "recompute": "selective", "schedule": "1f1b"},
        {"recompute": None, "schedule": "1f1b"},
        {"schedule": "dualpipe_v"},
        {"schedule": "interleaved_1f1b", "stage": 2, "microbatch": 2},
    ]
    found = resolve_recipe("deepseek_v3_671b")
    assert_as_planned_whole(found, "h800", changes)
    # On the last rank a gradient of MTP's experts waits for a bucket that it shares with the layer before.
    zero2 = {"pp": 8, "tp": 2, "ep": 32, "stage": 2, "schedule": "1f1b"}
    assert_as_planned_whole(found, "h800", [zero2], 0.02)


@pytest.mark.full
def test_blocks_of_v3_under_dualpipe_v_at_other_degrees():
    """The first rank holds embedding and head, which share a parameter; on the last two stages end apart."""
    changes = [
        {"pp": 8, "tp": 2, "ep": 32},
        {"pp": 8, "tp": 2, "ep": 32, "stage": 2},
        {"stage": 2},
    ]
    assert_as_planned_whole(resolve_recipe("deepseek_v3_671b"), "h800", changes)


def test_a_model_of_too_few_layers_is_planned_whole():
    assert choose(Costs.alike(3)).pair == 0
    with pytest.raises(NotComposable, match="2 layers are too few"):
        choose(Costs.alike(2))
    # Of each kind there must be one beside the pair.
    pieces = choose(Costs(layers=(1.0, 2.0, 2.0, 2.0)))
    assert (pieces.singles, pieces.pair) == ((0, 3), 1)
