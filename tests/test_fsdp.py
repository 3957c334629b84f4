"""``fsdp2`` beside other plugins, its checkpoints, and plans of it against what happens on gloo."""

import json
import re
from collections import Counter
from unittest import mock

import attrs
import pytest
from nanotrain_moe_transformer.samples import QWEN3
from nanotrain_plan.comms import Links
from nanotrain_plan.dry.collectives import Collective
from nanotrain_plan.hardware import find_hardware
from nanotrain_plan.stages import dry_stages
from nanotrain_plan.timing import step_time
from planned import happened, planned, planned_memory
from test_docs import failed
from test_example_torch_wrappers import STAGED, goes_on, update
from test_plan_truth import LOSSES
from test_plan_truth import case as small

from nanotrain_core.api import Exit, NanotrainError, Selection
from nanotrain_core.cli import main
from nanotrain_core.layout.dtensors import is_dtensor
from nanotrain_core.testing import Case, RankFailure, run_ranks
from nanotrain_core.testing.compare import assert_same, whole
from nanotrain_core.testing.probe import make_engine, train

OFFLOAD = {"use": "activation_offload", "min_mb": 0.0, "keep": 0}
EXPERTS = {"model": {"use": "routed"}, "batch": {"sequences": 8}}
ALONG_EDP = [{"use": "ep_deepseek"}, {"use": "fsdp2"}]
HYBRID = {"dp": 4, "dp_shard": 2}
MOE = {"model": {"use": "moe_transformer", **QWEN3}, "batch": {"sequences": 8}}
SHARDED, KEPT = {"use": "fsdp2"}, {"use": "fsdp2", "reshard_after_forward": False}


def fsdp2(topology, *beside, **around):
    return Case(
        "parallel",
        use="fsdp2",
        topology=topology,
        overrides={"parallel": [*beside, SHARDED], **around},
    )


def test_an_older_torch_is_refused_by_its_version_before_a_process_starts(capsys):
    with mock.patch("nanotrain_fsdp.version", return_value="2.11.0+cpu"):
        assert main(["check", "laptop", "--set", "parallel.0.use=fsdp2"]) == Exit.USER
    told = capsys.readouterr()
    assert "parallel.0.use" in told.err
    assert "expected torch 2.13 or later, got 2.11.0+cpu" in told.err


def held(case):
    """Return the elements of weights, and of each of AdamW's moments, that this rank has."""
    engine = make_engine(case, {"run": {"steps": 1}})
    engine.fit()
    moments = [block.tensor.numel() for block in engine.run.optimizer.blocks() if "exp_avg_sq" in block.name]
    return sum(placed.parameter.numel() for placed in engine.run.placed), sum(moments)


def test_each_rank_holds_its_share_of_weights_and_of_their_state():
    (whole_model,) = run_ranks(held, 1, fsdp2({}))
    shares = run_ranks(held, 4, fsdp2({"dp": 4}))
    assert tuple(map(sum, zip(*shares, strict=True))) == whole_model
    assert max(share for each in shares for share in each) < 0.3 * whole_model[0]


def accounted(case):
    """Return the bytes of weights that the monitor ``memory`` counts on this rank."""
    engine = make_engine(case, {"run": {"steps": 1}, "monitor": [{"use": "memory"}]})
    engine.fit()
    (monitor,) = engine.run.monitors
    return monitor.accounts["weights"]


def test_memory_is_accounted_by_what_each_rank_holds():
    """A DTensor has no memory of its own, and reading that of all parameters ended the monitor's part."""
    (whole_model,) = run_ranks(accounted, 1, fsdp2({}))
    shares = run_ranks(accounted, 4, fsdp2({"dp": 4}))
    assert sum(shares) == pytest.approx(whole_model, rel=0.1)  # shards are padded to equal rows
    assert max(shares) < 0.3 * whole_model


PACKED = ["--set", 'precision={use="fp4_master"}']
QLORA = ["--set", 'parallel=[{use="fsdp2"},{use="lora"}]', "--set", 'precision={use="qlora"}']
DEFERRED = ["--set", 'schedule={use="zb_h1"}', "--set", "topology.pp=2"]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (PACKED, r"precision: fsdp2: .* DTensors, which 'fp4_master' .*: set packed = false, or take zero12"),
        (DEFERRED, "schedule: 'zb_h1' has W passes, which parallel 'fsdp2' .*; expected .* such as 1F1B"),
    ],
)
def test_what_a_run_refuses_is_refused_before_a_process_starts(more, text, capsys):
    told = ["laptop", "--set", 'parallel=[{use="fsdp2"}]', *more]
    for command in (["check", "--nproc", "4"], ["plan", "--ranks", "4"]):
        assert main([command[0], *told, *command[1:]]) == Exit.USER
        assert re.search(text, capsys.readouterr().err)


def test_what_a_run_takes_is_not_refused(capsys):
    whole_weights = ["--set", 'precision={use="fp4_master",packed=false}', "--nproc", "4"]
    staged = ["--set", 'schedule={use="1f1b"}', "--set", "topology.pp=2", "--nproc", "4"]
    frozen = [*QLORA, "--nproc", "4"]
    for more in (whole_weights, staged, frozen, [*PACKED, "--nproc", "1"]):  # one process shards nothing
        assert main(["check", "laptop", "--set", 'parallel=[{use="fsdp2"}]', *more]) == Exit.DONE


@pytest.mark.parametrize(
    ("kind", "use", "text"),
    [
        ("precision", "fp4_master", r"packed and trained, .* set precision.packed = false"),
        ("schedule", "zb_h1", "there are no W passes: take a schedule without them"),
    ],
)
def test_ranks_refuse_what_no_declaration_says(kind, use, text):
    """A precision or a schedule need not say what it does."""
    case = small({"dp": 2, "pp": 2}, "transformer", "1f1b", [SHARDED], {})
    recipe, registry = case.recipe(), case.registry()
    selection = Selection(kind, use, registry.get(kind, use).config())
    layout = registry.build(recipe.topology).layout(4)
    with pytest.raises(NanotrainError, match=f"fsdp2: .*{text}"):
        dry_stages(attrs.evolve(recipe, **{kind: selection}), registry, layout, host=True)


def test_a_monitor_that_replays_is_refused_before_the_first_step():
    """It is due after many steps, and torch would reduce what it computes."""
    case = fsdp2({"dp": 2}, monitor=[{"use": "replay", "every": 100}])
    with pytest.raises(RankFailure, match=r"monitor replay cannot replay .* DTensors"):
        run_ranks(update, 2, case, {})


def after_an_evaluation(case):
    """Return the names of weights that are still whole."""
    engine = make_engine(case, {"run": {"steps": 1}, "evaluation": {"every": 1, "sequences": 2}})
    engine.fit()
    parameters = (
        (name, each) for part in engine.run.stages.values() for name, each in part.named_parameters()
    )
    return [name for name, each in parameters if not is_dtensor(each)]


def test_no_weight_stays_whole_after_an_evaluation():
    """No backward pass frees it, and if a rollback changed its shard, the next step would not see that."""
    config = {"reshard_after_forward": False}
    case = attrs.evolve(fsdp2({"dp": 2}), config=config, overrides={"parallel": [KEPT]})
    assert run_ranks(after_an_evaluation, 2, case) == [[], []]


@pytest.mark.parametrize(("wrapper", "gathers"), [(SHARDED, 4), (KEPT, 0)])
def test_replicas_of_shards_all_reduce_once_in_a_step(wrapper, gathers):
    """On two hosts of two ranks: within a host in each microbatch, between hosts in the last one."""
    case = small(HYBRID, "transformer", "accumulate", [wrapper], {})
    recipe, registry = case.recipe(), case.registry()
    layout = registry.build(recipe.topology).layout(4)
    step = dry_stages(recipe, registry, layout, host=False).step_of(0)
    links = Links(attrs.evolve(find_hardware("h100"), devices_per_node=2), layout)
    first, last = (step.measured["B", 0, place, False].collectives for place in (0, 2))
    found = [Counter((each.op, links.axis(each), each.ranks) for each in sent) for sent in (first, last)]
    shards = {("all_gather", "dp_shard", (0, 1)): gathers, ("reduce_scatter", "dp_shard", (0, 1)): 5}
    assert found[0] == Counter(shards)
    assert found[1] - found[0] == {("all_reduce", "dp_replicate", (0, 2)): 5}
    assert not found[0] - found[1]
    gbs = links.hardware.links
    for each in last:
        inside = 2 * each.bytes if each.op == "all_reduce" else each.bytes
        rate = gbs.inter_gb_s if each.op == "all_reduce" else gbs.intra_gb_s
        expected = gbs.latency_us * 1.25e-6 + inside / 2 / (rate * gbs.achieved * 1e9)
        assert links.seconds(each) == pytest.approx(expected)
        assert links.is_sync(each)


def test_gathers_within_ranks_that_share_experts_are_those_of_weights():
    """The group of dp_shard is also one of ep, whose collectives overlap with less."""
    case = small(HYBRID | {"ep": 2}, "deepseek_v3", "accumulate", ALONG_EDP, {})
    layout = case.registry().build(case.recipe().topology).layout(4)
    links = Links(find_hardware("h100"), layout)
    assert links.is_sync(Collective("all_gather", (0, 1), 1024))
    assert links.axis(Collective("all_to_all", (0, 1), 1024)) == "ep"


@pytest.mark.parametrize(
    ("degrees", "key", "text"),
    [
        (
            ["dp_shard=3"],
            "run.ranks",
            "dp_shard 3 x cp 1 x tp 1 = 3 does not divide 4; 3 or 6 ranks would do",
        ),
        (["dp_shard=1"], "topology.dp_shard", "shards nothing; expected 2 or more"),
    ],
)
def test_shards_over_what_does_not_divide_are_refused(degrees, key, text, capsys):
    told = ["check", "laptop", "--nproc", "4", "--set", "parallel.0.use=fsdp2"]
    for each in degrees:
        told += ["--set", f"topology.{each}"]
    assert main(told) == Exit.USER
    err = capsys.readouterr().err
    assert key in err
    assert text in err


def trained_on(topology, folder, checkpoint="simple", **options):
    around = {"optimizer": {"use": "adamw", "lr": 0.01}, "checkpoint": {"use": checkpoint}}
    case, changes = fsdp2(topology, **around), {"run": {"steps": 4}}
    traces = run_ranks(train, case.world_size, case, changes, folder=folder, save_at=2, **options)
    return whole([trace.weights for trace in traces]), whole([trace.state for trace in traces])


@pytest.mark.parametrize(
    ("saver", "loader", "checkpoint"),
    [
        ({"dp": 2}, {}, "simple"),
        pytest.param({}, {"dp": 2}, "simple", marks=pytest.mark.full),
        pytest.param({"dp": 4}, {"dp": 2}, "sharded_v2", marks=pytest.mark.full),
        pytest.param({}, {"dp": 4}, "sharded_v2", marks=pytest.mark.full),
        (HYBRID, {}, "simple"),
        pytest.param({}, HYBRID, "simple", marks=pytest.mark.full),
        pytest.param(HYBRID, {"dp": 4}, "sharded_v2", marks=pytest.mark.full),
        pytest.param({"dp": 2}, HYBRID, "sharded_v2", marks=pytest.mark.full),
    ],
)
def test_a_checkpoint_of_shards_opens_on_any_layout(tmp_path, saver, loader, checkpoint):
    saved = trained_on(saver, tmp_path, checkpoint)
    resumed = trained_on(loader, tmp_path, checkpoint, resume="2")
    for what, one, other in zip(("weights", "state"), saved, resumed, strict=True):
        assert_same(other, one, f"{what} after resuming", atol=1e-9)


@pytest.mark.full
@pytest.mark.parametrize(
    ("topology", "beside", "around"),
    [
        ({"dp": 2, "tp": 2}, [{"use": "tp"}], {}),
        ({"dp": 2, "pp": 2}, [], STAGED),
        ({"dp": 2, "ep": 2}, [{"use": "ep_deepseek"}], EXPERTS),
        ({"dp": 4, "ep": 2}, [{"use": "ep_deepseek"}], EXPERTS),
        ({"dp": 4, "ep": 2}, [{"use": "ep_deepseek"}, OFFLOAD], EXPERTS),
        (HYBRID | {"tp": 2}, [{"use": "tp"}], {}),
        (HYBRID | {"cp": 2}, [{"use": "cp"}], {}),
        (HYBRID | {"pp": 2}, [], STAGED),
        (HYBRID | {"ep": 2}, [{"use": "ep_deepseek"}], EXPERTS),
        ({"dp": 8, "dp_shard": 4, "ep": 2}, [{"use": "ep_deepseek"}], EXPERTS),
        ({"dp": 4, "ep": 2}, [{"use": "ep_deepseek"}], MOE),
    ],
    ids=[
        "tp",
        "tied across stages",
        "experts",
        "experts in shards",
        "offload",
        "hybrid, tp",
        "hybrid, cp",
        "hybrid, tied across stages",
        "hybrid, experts whole",
        "hybrid, experts in shards",
        "moe",
    ],
)
def test_shards_beside_other_wrappers_pass_every_check(topology, beside, around):
    assert failed(fsdp2(topology, *beside, **around)) == {}


def test_shards_refuse_to_go_on_after_a_step_that_was_broken_off():
    """It keeps gradients of layers, and those of embedding and head are never sent."""
    with pytest.raises(RankFailure, match="fsdp2: a step was broken off"):
        run_ranks(goes_on, 2, fsdp2({"dp": 2}))


# --- plans ----------------------------------------------------------------------------------------

UNEVEN = small({"dp": 2}, "transformer", "accumulate", [SHARDED], {})  # 67 rows of a vocabulary


@pytest.mark.parametrize(
    "case",
    [
        UNEVEN,
        *(
            pytest.param(small(*form, **more), marks=pytest.mark.full)
            for form, more in (
                (({"dp": 2}, "transformer", "accumulate", [SHARDED], {}), {"precision": "bf16"}),
                (({"dp": 2}, "transformer", "accumulate", [KEPT], {}), {}),
                (({"dp": 4}, "transformer", "accumulate", [SHARDED], {}), {}),
                (({"dp": 2}, "transformer", "accumulate", [{"use": "recompute"}, SHARDED], {}), {}),
                (({"dp": 2, "pp": 2}, "transformer", "1f1b", [SHARDED], {}), {"tied": True}),
                (({"dp": 2, "pp": 2}, "transformer", "1f1b", [KEPT], {}), {}),
                (({"dp": 2, "pp": 2}, "transformer", "interleaved_1f1b", [SHARDED], {}), {}),
                (({"dp": 2, "tp": 2}, "transformer", "accumulate", [{"use": "tp"}, SHARDED], {}), {}),
                (({"dp": 4, "ep": 2}, "deepseek_v3", "accumulate", ALONG_EDP, {}), {}),
                ((HYBRID, "transformer", "accumulate", [SHARDED], {}), {}),
                ((HYBRID, "transformer", "accumulate", [KEPT], {}), {"precision": "bf16"}),
                ((HYBRID | {"pp": 2}, "transformer", "1f1b", [SHARDED], {}), {}),
                ((HYBRID | {"ep": 2}, "deepseek_v3", "accumulate", ALONG_EDP, {}), {}),
                (({"dp": 4, "ep": 2}, "moe", "accumulate", ALONG_EDP, {}), {}),
            )
        ),
    ],
)
def test_a_step_is_as_planned(case):
    """Collectives in their order and bytes, weights, state of the optimizer, activations and the peak.

    Torch pads the weights of the last ranks, if they have a row less, to the size of the first rank's.
    """
    for rank, (plan, real) in enumerate(zip(planned(case), happened(case), strict=True)):
        assert plan.collectives == real.collectives, f"rank {rank}"
        weights, padded = plan.state.pop("weights"), real.state.pop("weights")
        assert plan.state == real.state, f"rank {rank}"
        assert weights == padded if rank == 0 else 0.96 * padded < weights <= padded
        assert plan.kept == pytest.approx(real.kept, rel=0.01, abs=LOSSES), f"rank {rank}"
        assert plan.peak == pytest.approx(real.peak, rel=0.02), f"rank {rank}"


def step_of(*wrappers):
    """Return the planned step of a rank."""
    case = small({"dp": 2}, "transformer", "accumulate", [*wrappers], {})
    recipe, registry = case.recipe(), case.registry()
    layout = registry.build(recipe.topology).layout(recipe.run.ranks)
    return dry_stages(recipe, registry, layout, host=True).step_of(0)


def test_a_plan_holds_gathered_weights_for_as_long_as_they_are_there():
    """Embedding and head until the end of backward; layers until the end of their pass, or their backward."""
    kept, freed, summed = (step_of(*wrappers) for wrappers in ([KEPT], [SHARDED], []))
    first = ("F", 0, 0, False)
    part, *layers = freed.measured[first].collectives
    assert {found.op for found in (part, *layers)} == {"all_gather"}
    assert len(layers) == 4
    left = [step.measured[first].made for step in (kept, freed, summed)]
    assert left[0] - left[1] == sum(found.bytes for found in layers)
    assert left[1] - left[2] == part.bytes
    # Rows that make shards equal are gathered, too; and nothing else is whole between steps.
    assert 2 * freed.state["weights"] == part.bytes + sum(found.bytes for found in layers)
    assert kept.state["other"] == freed.state["other"] == summed.state["other"]


@pytest.mark.parametrize(
    ("topology", "wrapper"),
    [({"dp": 2}, SHARDED), ({"dp": 2}, KEPT), pytest.param(HYBRID, SHARDED, marks=pytest.mark.full)],
)
def test_the_peak_is_that_of_a_step_of_all_microbatches(topology, wrapper):
    """Each forward pass gathers again what the backward pass before it freed."""
    case = small(topology, "transformer", "accumulate", [wrapper], {})
    ((peak, _),) = planned_memory(case).values()
    assert peak == pytest.approx(planned(case)[0].peak, rel=0.01)


@pytest.mark.parametrize("wrapper", [KEPT, pytest.param(SHARDED, marks=pytest.mark.full)])
def test_the_peak_of_a_pipeline_is_that_of_all_its_microbatches(wrapper):
    """Weights that a backward pass frees are there again for the next one, beside activations of others."""
    case = small({"dp": 2, "pp": 2}, "transformer", "1f1b", [wrapper], {})
    of_ranks = planned(case)
    for ranks, (peak, _) in planned_memory(case).items():
        assert peak == pytest.approx(max(of_ranks[rank].peak for rank in ranks), rel=0.01)


def test_no_pass_hides_more_of_its_collectives_than_it_computes():
    """On links beside which computation takes no time, a step takes the time of its collectives."""
    case = small({"dp": 2}, "transformer", "accumulate", [SHARDED], {})
    recipe, registry = case.recipe(), case.registry()
    stages = dry_stages(recipe, registry, registry.build(recipe.topology).layout(2), host=False)
    slow = find_hardware("h100")
    slow = attrs.evolve(slow, links=attrs.evolve(slow.links, intra_gb_s=1e-4))
    links = Links(slow, stages.layout)
    actions = (stages.phase(0, action) for action in stages.actions[0])
    passes = sum(links.seconds(each) for phase in actions for each in phase.collectives)
    assert step_time(stages, slow).seconds > passes


def test_an_explanation_of_weights_in_shards_does_not_say_that_nothing_is_sharded(capsys):
    told = ["explain", "laptop", "--nproc", "2", "--set", 'parallel=[{use="fsdp2"}]', "--json"]
    assert main(told) == Exit.DONE
    sections = json.loads(capsys.readouterr().out)["sections"]
    texts = [
        each["text"]
        for section in sections
        for each in section["statements"]
        if "updates all" in each["text"]
    ]
    assert texts
    assert not any("nothing is sharded" in text for text in texts)
