"""``lora`` on every layout trains the adapters of one process, beside a model that stays as it was."""

import attrs
import pytest
from as_one_process import assert_trains_as_one_process
from compositions import OPTIMIZERS, Composition, compiled
from planned import happened, planned
from test_plan_truth import DDP, SP, ZERO, assert_as_planned
from test_plan_truth import case as small

from nanotrain_core.testing import RankFailure, run_ranks
from nanotrain_core.testing.compare import assert_same, whole
from nanotrain_core.testing.probe import train

PLAIN = Composition(
    model="transformer",
    tp=1,
    pp=1,
    dp=1,
    ep=1,
    etp=1,
    schedule="accumulate",
    sp=False,
    tied=False,
    microbatch=3,
    experts_first=False,
    zero=0,
)
LORA = {"use": "lora", "rank": 4, "alpha": 32.0}

#: In the first tier.
FIRST = [{"tp": 2, "sp": True}]
LAYOUTS = [
    {"dp": 2},
    {"dp": 2, "zero": 1},
    {"dp": 2, "zero": 2, "recompute": True},
    {"tp": 2},
    {"tp": 2, "sp": True, "recompute": True},
    {"tp": 2, "sp": True, "dp": 2},
    {"tp": 4, "sp": True},  # ranks use copies of key and value heads
    {"tp": 4},
    {"pp": 2, "schedule": "1f1b", "tied": True},
    {"pp": 2, "schedule": "zb_h1", "tp": 2, "sp": True},
    {"pp": 2, "schedule": "interleaved_1f1b", "dp": 2, "zero": 2},
    {"pp": 2, "schedule": "dualpipe_v", "recompute": True},
    {"cp": 2},
    {"cp": 2, "tp": 2, "sp": True, "communication": "ring", "zero": 1},
    *(
        {"model": model, **layout}
        for model in ("moe", "deepseek_v3", "deepseek_v2")
        for layout in (
            {"dp": 2, "ep": 2},
            {"tp": 2, "ep": 2, "sp": True},
            {"tp": 2, "dp": 2, "ep": 2, "zero": 1},
        )
    ),
    {"model": "deepseek_v3", "tp": 2, "pp": 2, "ep": 2, "schedule": "1f1b"},
]


def with_lora(composition, config=None, *more):
    """Return a composition as a case, in which adapters come after all that split layers."""
    case = composition.case()
    wrappers = list(case.overrides["parallel"])
    at = len(wrappers) - (wrappers[-1]["use"] == "ddp")
    wrappers[at:at] = [{**LORA, **(config or {})}, *more]
    optimizer = composition.optimizers()["adamw"]
    overrides = {**case.overrides, "parallel": wrappers, "optimizer": optimizer}
    return attrs.evolve(case, overrides=overrides, name=f"lora-{composition.id}")


def one_process(case):
    """Return the run that it must equal: its optimizer shards nothing."""
    return attrs.evolve(case.alone(), overrides={**case.overrides, "optimizer": OPTIMIZERS["adamw"]})


def layouts():
    for layout in (*FIRST, *LAYOUTS):
        composition = attrs.evolve(PLAIN, **layout)
        yield pytest.param(composition, id=composition.id, marks=() if layout in FIRST else pytest.mark.full)


@pytest.mark.parametrize("composition", [*layouts()])
def test_adapters_train_as_in_one_process(composition):
    case = with_lora(composition)
    assert_trains_as_one_process(case, one_process(case))


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [{"tp": 2, "sp": True}, {"dp": 2, "zero": 2, "recompute": True}], ids=["tp", "zero"]
)
def test_compiled_layers_train_adapters_as_eager_ones(layout):
    case = with_lora(attrs.evolve(PLAIN, **layout))
    batch = {"batch": {"sequences": 4, "microbatch": 2, "length": 8}}  # of one shape: few graphs
    case = attrs.evolve(case, overrides={**case.overrides, **batch})
    assert_trains_as_one_process(compiled(case), one_process(case))


FSDP2 = {"use": "fsdp2"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "others"),
    [
        ({"dp": 2}, ["ddp"]),
        ({"dp": 2}, ["fsdp2"]),
        ({"cp": 2}, ["cp"]),
        ({}, ["recompute"]),
        ({"dp": 2, "ep": 2, "model": "deepseek_v3"}, ["ep_deepseek", "ddp"]),
        ({"dp": 2, "tp": 2}, ["fsdp2", "tp"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("first", [False, True], ids=["last", "first"])
def test_all_but_what_splits_its_layers_may_be_listed_before_or_after_it(layout, others, first):
    """An fsdp2 before it was refused, as one that has to be listed before it."""
    composition = attrs.evolve(PLAIN, **layout)
    wrappers = [{"use": use} for use in others]
    last = wrappers.index({"use": "tp"}) + 1 if first and "tp" in others else 0 if first else len(wrappers)
    wrappers.insert(last, LORA)
    case = composition.case()
    case = attrs.evolve(
        case,
        overrides={**case.overrides, "parallel": wrappers, "optimizer": OPTIMIZERS["adamw"]},
        name=f"lora-{composition.id}",
    )
    assert_trains_as_one_process(case, one_process(case))


@pytest.mark.full
def test_hybrid_shards_may_be_listed_before_it():
    """Replicas of shards sum gradients in backward: the dimensions of the sum are others than they were."""
    case = with_lora(attrs.evolve(PLAIN, dp=4))
    around = {**case.overrides, "parallel": [FSDP2, LORA]}
    hybrid = attrs.evolve(case, topology={**case.topology, "dp_shard": 2}, overrides=around)
    assert_trains_as_one_process(hybrid, one_process(attrs.evolve(case, overrides=around)))


@pytest.mark.full
@pytest.mark.parametrize("before", [[], [FSDP2]], ids=["alone", "after_fsdp2"])
def test_before_tp_it_is_refused(before):
    """Beside COLUMNs alone the core does not refuse it, as tp sums the gradient of what it finds there."""
    wrappers = [*before, {**LORA, "targets": ["q", "v"]}, {"use": "tp"}]
    case = attrs.evolve(PLAIN, tp=2, dp=1 + len(before)).case()
    overrides = {**case.overrides, "parallel": wrappers, "optimizer": OPTIMIZERS["adamw"]}
    case = attrs.evolve(case, overrides=overrides)
    with pytest.raises(RankFailure, match=r"attn.[qv] was split .* List .lora. after"):
        run_ranks(train, case.world_size, case, {})


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ({"dp": 2}, "transformer"),
        ({"dp": 2, "tp": 2, "sp": True, "recompute": True}, "transformer"),
        ({"dp": 2, "ep": 2}, "deepseek_v3"),
    ],
)
def test_adapters_train_where_weights_are_sharded(layout, model):
    composition = attrs.evolve(PLAIN, model=model, **layout)
    case = with_lora(composition)
    wrappers = [*case.overrides["parallel"][:-1], FSDP2]
    case = attrs.evolve(case, overrides={**case.overrides, "parallel": wrappers})
    assert_trains_as_one_process(case, one_process(case))


@pytest.mark.full
@pytest.mark.parametrize(
    ("topology", "wrappers", "optimizer", "precision"),
    [
        ({"dp": 2}, [LORA, *DDP], {}, "bf16"),
        ({"dp": 2}, [LORA], {**ZERO, "stage": 2}, "bf16"),
        ({"tp": 2}, [*SP, LORA], {}, "fp32"),
        ({"tp": 2}, [{"use": "recompute"}, *SP, LORA], {}, "bf16"),
        ({"pp": 2}, [LORA], {}, "fp32"),
    ],
    ids=["ddp", "zero2", "sequence_parallel", "recompute", "pp"],
)
def test_a_step_is_as_planned(topology, wrappers, optimizer, precision):
    """Frozen weights have no gradients, masters or state in either, and their inputs are not kept."""
    schedule = "1f1b" if "pp" in topology else "accumulate"
    assert_as_planned(small(topology, "transformer", schedule, wrappers, optimizer, precision=precision))


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_of_sharded_weights_is_as_planned(precision):
    case = small({"dp": 2}, "transformer", "accumulate", [LORA, FSDP2], {}, precision=precision)
    for rank, (plan, real) in enumerate(zip(planned(case), happened(case), strict=True)):
        assert plan.collectives == real.collectives, f"rank {rank}"
        weights, padded = plan.state.pop("weights"), real.state.pop("weights")
        assert plan.state == real.state, f"rank {rank}"
        assert weights == padded if rank == 0 else 0.96 * padded < weights <= padded


def trained_on(composition, folder, **options):
    case = with_lora(composition)
    overrides = {**case.overrides, "checkpoint": {"use": "sharded_v2"}, "optimizer": OPTIMIZERS["adamw"]}
    case = attrs.evolve(case, overrides=overrides)
    changes = {"run": {"steps": 4}}
    traces = run_ranks(train, case.world_size, case, changes, folder=folder, save_at=2, **options)
    return whole([trace.weights for trace in traces]), whole([trace.state for trace in traces])


@pytest.mark.full
def test_a_run_goes_on_on_another_layout(tmp_path):
    one, other = (
        attrs.evolve(PLAIN, **layout)
        for layout in ({"tp": 2, "sp": True, "dp": 2}, {"pp": 2, "schedule": "1f1b"})
    )
    saved = trained_on(one, tmp_path)
    resumed = trained_on(other, tmp_path, resume="2")
    for what, before, after in zip(("weights", "state"), saved, resumed, strict=True):
        assert_same(after, before, f"{what} after resuming", atol=1e-9)
