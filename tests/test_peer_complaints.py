"""What users of Megatron-LM, Megatron-Bridge and DeepSpeed found wrong, thread by thread: here it is right.

A test is named after the threads it is about. More of them stand beside what they test, under such names:
``git grep -E 'def test_.*_[0-9]{3,}_'``. Without a case: context parallelism (Megatron 673, 1464, 1465),
which is tested in ``test_context_parallel.py``, and ZeRO-3 (DeepSpeed 5008, 7461, 7844), since nothing
here does it; of Megatron 2846 and DeepSpeed 1800 we do not know what they say, and Megatron 2762 is about
speed.
"""

from datetime import timedelta
from pathlib import Path
from unittest import mock

import attrs
import pytest
import torch
import torch.distributed as dist
from compositions import Composition

from nanotrain_core.batch import IGNORE, Shard
from nanotrain_core.hf.convert import convert
from nanotrain_core.registry.registry import load_plugins
from nanotrain_core.testing import run_ranks
from nanotrain_core.testing.compare import assert_same, whole
from nanotrain_core.testing.probe import make_run, train

UNEVEN = str(Path(__file__).with_name("uneven.py"))

ONE_STEP = {"run": {"steps": 1}}


def case(*, model=None, data=None, **choices):
    """Return a DeepSeek-V3 on a layout; ``model`` and ``data`` change these tables."""
    defaults = {"tp": 1, "pp": 1, "dp": 1, "ep": 1, "etp": 1, "schedule": "accumulate", "sp": False}
    more = {"model": "deepseek_v3", "tied": False, "microbatch": 2, "experts_first": False, "zero": 0}
    found = Composition(**(defaults | more | choices)).case()
    tables = dict(found.overrides)
    tables["model"] = {**tables["model"], **(model or {})}
    tables["data"] = {**tables["data"], **(data or {})}
    return attrs.evolve(found, overrides=tables, plugins=(UNEVEN,))


def first_step(case):
    """Return the gradients of the first step on the case's layout and in one process, and both reports."""
    found = run_ranks(train, case.world_size, case, ONE_STEP)
    (alone,) = run_ranks(train, 1, case.alone(), ONE_STEP)
    got, want = whole([trace.gradients for trace in found], atol=1e-9), whole([alone.gradients])
    return got, want, found[0].reports[0], alone.reports[0]


def targets(case):
    """Return the number of targets of every sequence of the first batch."""
    recipe = case.recipe()
    data = case.registry().build(recipe.data)
    data.open(length=recipe.batch.length, seed=recipe.run.seed)
    batch = data.train_batch(recipe.batch.sequences, Shard(0, 1))
    return [int((row != IGNORE).sum()) for row in batch.targets]


# --- wrong results across combinations -----------------------------------------------------------

LAYOUTS = {
    "dp4": {"dp": 4},
    "pp2-dp2": {"pp": 2, "dp": 2, "schedule": "1f1b"},
    "tp2-dp2-sp": {"tp": 2, "dp": 2, "sp": True},
    "tp2-ep2": {"tp": 2, "ep": 2, "dp": 1},
}


@pytest.mark.full_cases("pp2-dp2", "dp4", "tp2-ep2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron_7452_and_1532_every_loss_term_is_divided_by_its_global_count(layout):
    """MTP's loss was divided by each rank's own count, or not averaged at all."""
    got, want, here, there = first_step(case(data={"use": "uneven"}, **LAYOUTS[layout]))
    assert here.losses.keys() >= {"lm", "mtp"}
    assert len(set(targets(case(data={"use": "uneven"})))) > 2, "sequences have different numbers of targets"
    assert here.losses == pytest.approx(there.losses, abs=1e-9)
    assert_same(got, want, "gradients", atol=1e-9)


@pytest.mark.full_cases("dp4", "tp2-ep2")
@pytest.mark.parametrize("layout", ["tp2-dp2-sp", "tp2-ep2", "dp4"])
def test_megatron_7452_3768_and_3672_a_balance_loss_weighs_the_same_on_every_layout(layout):
    """The routers' gradient from it was twice as large with tensor parallelism."""
    heavy = {"seq_balance": 100.0, "mtp": 0}
    got, want, here, there = first_step(case(model=heavy, **LAYOUTS[layout]))
    assert here.losses["seq_balance"] == pytest.approx(there.losses["seq_balance"], abs=1e-9)
    routers = [name for name in want if name.endswith("router.weight")]
    assert routers
    for name in routers:
        ratio = torch.linalg.vector_norm(got[name]) / torch.linalg.vector_norm(want[name])
        assert ratio.item() == pytest.approx(1.0, abs=1e-9), name


@pytest.mark.full_cases(
    "{'tp': 2, 'dp': 2, 'ep': 2}", "{'tp': 4, 'ep': 2, 'sp': True}", "{'tp': 2, 'dp': 2, 'etp': 2}"
)
@pytest.mark.parametrize(
    "layout",
    [{"tp": 2, "dp": 2, "ep": 2}, {"tp": 2, "dp": 2, "etp": 2}, {"tp": 4, "ep": 2, "sp": True}],
    ids=str,
)
def test_bridge_1376_experts_have_groups_of_their_own_beside_tensor_parallelism(layout):
    """Slices of experts were gathered over the tensor-parallel group, which is another one."""
    got, want, *_ = first_step(case(**{"dp": 1} | layout))
    experts = {name: value for name, value in want.items() if ".experts." in name}
    assert experts
    assert_same({name: got[name] for name in experts}, experts, "gradients of experts", atol=1e-9)


@pytest.mark.full_cases("zero12", "sgd")
@pytest.mark.parametrize(
    "optimizer",
    [
        {"use": "adamw", "lr": 0.1, "weight_decay": 0.5},
        {"use": "sgd", "lr": 0.1, "weight_decay": 0.5, "momentum": 0.9},
        {"use": "zero12", "lr": 0.1, "weight_decay": 0.5},
    ],
    ids=lambda table: table["use"],
)
def test_megatron_6099_no_optimizer_touches_the_bias_of_a_router(optimizer):
    """It moves by the sign of the load alone."""
    zero = 1 if optimizer["use"] == "zero12" else 0
    traces = run_ranks(train, 2, case(dp=2, zero=zero), {"optimizer": optimizer})
    biases = {b.name: b.tensor for b in traces[0].weights if b.name.endswith("router.bias")}
    assert biases
    for name, bias in biases.items():
        moves = bias / 0.01  # bias_update_rate
        torch.testing.assert_close(moves, moves.round(), rtol=0, atol=1e-4, msg=name)
        assert 0 < bias.abs().max() < 0.031, "three steps"
    assert not [block.name for block in traces[0].state if "router.bias" in block.name]


# --- scales of gradients -------------------------------------------------------------------------


@pytest.mark.full
def test_deepspeed_1488_and_966_stages_and_plain_data_parallelism_agree():
    """The same training came out differently from one ZeRO stage to the next."""
    adamw = {"lr": 0.01, "clip_norm": 0.5}
    weights = {}
    for zero, table in (
        (0, {"use": "adamw"}),
        (1, {"use": "zero12", "stage": 1}),
        (2, {"use": "zero12", "stage": 2}),
    ):
        traces = run_ranks(train, 2, case(dp=2, zero=zero), {"optimizer": {**table, **adamw}})
        weights[zero] = whole([trace.weights for trace in traces], atol=1e-9)
    for zero in (1, 2):
        assert_same(weights[zero], weights[0], f"stage {zero}", atol=1e-9)


@pytest.mark.full_cases("1f1b", "interleaved_1f1b")
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_deepspeed_1629_823_and_1110_sharded_gradients_meet_a_pipeline(schedule):
    """ZeRO-2 was refused with pipelines, or gave other gradients."""
    table = {"optimizer": {"use": "zero12", "stage": 2, "lr": 0.01, "clip_norm": 0.5}}
    piped = case(pp=2, dp=2, schedule=schedule, zero=2)
    found = run_ranks(train, 4, piped, table)
    (alone,) = run_ranks(
        train, 1, piped.alone(), {"optimizer": {"use": "adamw", "lr": 0.01, "clip_norm": 0.5}}
    )
    got, want = whole([trace.weights for trace in found], atol=1e-9), whole([alone.weights])
    assert_same(got, want, "weights after 3 steps", atol=1e-9)


@pytest.mark.full_cases("5-zb_h1", "5-interleaved_1f1b", "5-gpipe", "5-dualpipe_v")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "dualpipe_v"])
@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.full), 5])
def test_deepspeed_8152_and_7773_microbatches_weigh_the_same_in_every_stage(schedule, microbatches):
    """Gradients were divided by their number once for each later stage, or not at all.

    Every one has another number of targets here, and there are fewer than stages, or no multiple of them.
    """
    piped = case(data={"use": "uneven"}, model={"mtp": 2}, tied=True, pp=2, microbatch=1, schedule=schedule)
    piped = attrs.evolve(
        piped,
        overrides={**piped.overrides, "batch": {"sequences": microbatches, "length": 8, "microbatch": 1}},
    )
    got, want, here, there = first_step(piped)
    assert here.losses == pytest.approx(there.losses, abs=1e-9)
    assert here.grad_norm == pytest.approx(there.grad_norm, abs=1e-9)
    assert_same(got, want, "gradients", atol=1e-9)


@pytest.mark.full_cases("zb_h1")
@pytest.mark.parametrize("schedule", ["zb_h1", "dualpipe_v"])
def test_sharded_gradients_wait_for_weight_gradients_that_were_put_off(schedule):
    """The head, cut by a bucket's end, gets the next microbatch's gradient before this one's are complete."""
    table = {"optimizer": {"use": "zero12", "stage": 2, "bucket_mb": 0.0015, "lr": 0.1, "clip_norm": 0.0}}
    choices = {"model": "transformer", "tp": 1, "pp": 2, "dp": 1, "ep": 1, "etp": 1, "sp": False}
    rest = {"tied": False, "microbatch": 1, "experts_first": False, "zero": 2}
    piped = Composition(**choices, **rest, schedule=schedule).case()
    found = run_ranks(train, 2, piped, table)
    (alone,) = run_ranks(
        train, 1, piped.alone(), {"optimizer": {"use": "adamw", "lr": 0.1, "clip_norm": 0.0}}
    )
    got, want = whole([trace.weights for trace in found], atol=1e-9), whole([alone.weights])
    assert_same(got, want, "weights after 3 steps", atol=1e-9)


@pytest.mark.full_cases("1")
@pytest.mark.parametrize("zero", [0, 1])
def test_deepspeed_7839_and_7837_bfloat16_has_no_loss_scale(zero):
    """Gradients of bf16 runs were divided by a scale of 65536 that only fp16 multiplies by."""
    optimizer = {"use": "zero12" if zero else "adamw", "lr": 0.01, "clip_norm": 0.0}
    norms = {}
    for precision in ("fp32", "bf16"):
        changes = {"optimizer": optimizer, "precision": {"use": precision}, **ONE_STEP}
        (report,) = run_ranks(train, 2, case(dp=2, zero=zero, model={"mtp": 0}), changes)[0].reports
        assert report.loss_scale == 1.0
        norms[precision] = report.grad_norm
    assert norms["bf16"] == pytest.approx(norms["fp32"], rel=0.2)


# --- checkpoints on other layouts ----------------------------------------------------------------


@pytest.fixture(scope="module")
def four_stages(tmp_path_factory):
    """Train 3 steps over 4 pipeline stages and keep the checkpoint after the second."""
    folder = tmp_path_factory.mktemp("run")
    changes = {"optimizer": {"use": "adamw", "lr": 0.01}}
    return (
        folder,
        changes,
        run_ranks(train, 4, case(pp=4, schedule="1f1b"), changes, folder=folder, save_at=2),
    )


@pytest.mark.full
def test_megatron_659_and_1517_a_checkpoint_of_four_stages_goes_on_with_experts_over_four_ranks(four_stages):
    folder, changes, straight = four_stages
    found = run_ranks(train, 4, case(dp=4, ep=4), changes, folder=folder, resume="2")
    got, want = (whole([trace.weights for trace in traces], atol=1e-9) for traces in (found, straight))
    assert_same(got, want, "weights", atol=1e-9)


@pytest.mark.full
def test_megatron_7162_areal_1468_and_skyrl_1268_moments_survive_a_change_of_layout(four_stages):
    """They were kept by one checkpoint format only, or dropped without a word."""
    folder, changes, straight = four_stages
    found = run_ranks(train, 2, case(tp=2, ep=2), changes, folder=folder, resume="2")
    got, want = (whole([trace.state for trace in traces], atol=1e-9) for traces in (found, straight))
    assert {name.partition("/")[0] for name in want} >= {"exp_avg", "exp_avg_sq"}
    assert_same(got, want, "state of the optimizer", atol=1e-9)


@pytest.mark.full
def test_bridge_4565_and_4601_a_resumed_run_sees_the_data_it_has_not_seen(four_stages):
    folder, changes, straight = four_stages
    for layout in ({"dp": 4}, {"pp": 4, "schedule": "1f1b"}):
        found = run_ranks(train, 4, case(**layout), changes, folder=folder, resume="2")
        (report,) = found[0].reports
        assert report.step == 3
        assert report.loss == pytest.approx(straight[0].reports[2].loss, abs=1e-9)
        assert found[0].meta["data"] == straight[0].meta["data"]


# --- weights of other libraries ------------------------------------------------------------------

RELEASED = {"mtp_input": "embedding_first", "route_scale": 2.5}


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """Train a step in one process; return the run's folder, and one as DeepSeek released its weights."""
    run, exported = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("weights") / "exported"
    run_ranks(train, 1, case(model=RELEASED).alone(), ONE_STEP, folder=run)
    convert(run, exported, load_plugins())
    return run, exported


@pytest.mark.full_cases(
    "{'tp': 2, 'pp': 2, 'ep': 2, 'sp': True, 'schedule': 'zb_h1'}",
    "{'pp': 2, 'dp': 2, 'ep': 2, 'schedule': 'dualpipe_v'}",
)
@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "pp": 2, "ep": 2, "sp": True, "schedule": "zb_h1"},
        {"pp": 2, "dp": 2, "ep": 2, "schedule": "dualpipe_v"},
        {"tp": 2, "dp": 2, "ep": 2, "etp": 2},
    ],
    ids=str,
)
def test_megatron_1397_ranks_of_every_layout_start_from_their_blocks_of_released_weights(layout, released):
    """They had to be cut for a layout beforehand. Rotary rows and experts stand in other places there."""
    ours, theirs = ({"run": {"steps": 1, "weights": str(path)}} for path in released)
    spread = case(model=RELEASED, **layout)
    found = run_ranks(train, spread.world_size, spread, theirs)
    (alone,) = run_ranks(train, 1, spread.alone(), ours)
    got, want = whole([trace.gradients for trace in found], atol=1e-9), whole([alone.gradients])
    assert_same(got, want, "gradients", atol=1e-9)
    assert found[0].reports[0].losses == pytest.approx(alone.reports[0].losses, abs=1e-9)


# --- hangs ---------------------------------------------------------------------------------------


def test_megatron_1444_a_stage_without_experts_stops_nobody():
    """Known since v0.11: ranks of other stages waited for its balance losses and its experts' gradients."""
    dense = {"dense_layers": 2, "mtp": 0}
    got, want, here, there = first_step(case(model=dense, pp=2, dp=2, ep=2, schedule="1f1b"))
    assert not [name for name in want if name.startswith(("layers.0.moe", "layers.1.moe"))]
    assert_same(got, want, "gradients", atol=1e-9)
    assert here.losses == pytest.approx(there.losses, abs=1e-9)


def timeouts(case, changes):
    """Return the timeout of every group of several ranks that this rank makes."""
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
        make_run(case, changes)
    return [call.kwargs.get("timeout") for call in made.call_args_list if len(call.args[0]) > 1]


def test_megatron_2238_every_group_has_the_timeout_of_the_run():
    """The group of the experts waited for ten minutes, whatever the run said."""
    for found in run_ranks(timeouts, 4, case(pp=2, dp=2, ep=2, schedule="1f1b"), {"run": {"timeout": 77.0}}):
        assert len(found) >= 2
        assert set(found) == {timedelta(seconds=77)}
