"""Muon beside other plugins: whole matrices on every layout, its plans, and checkpoints on another layout."""

import re
from collections import Counter
from pathlib import Path

import pytest
from compositions import MODELS, VOCAB
from examples_of_plugins import ALIBI, example
from examples_of_plugins import TP as SUMMED_TP
from nanotrain_plan.blocks.composer import Composer
from nanotrain_plan.hardware import find_hardware
from nanotrain_plan.plan import make_plan
from planned import happened, planned
from test_docs import failed
from test_plan_stages import SYNCED

from nanotrain_core.api import Exit, resolve_recipe
from nanotrain_core.cli import main
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.compare import assert_same, whole
from nanotrain_core.testing.probe import make_engine, make_run, train

TP, EP, CP, DDP, FSDP2 = ({"use": use} for use in ("tp", "ep_deepseek", "cp", "ddp", "fsdp2"))
SP = {**TP, "sequence_parallel": True}
ZERO1 = {"use": "zero12", "bucket_mb": 0.0013}  # ends within tensors
ZERO2 = {**ZERO1, "stage": 2}
SHARE = {"share_replicas": True}


def muon(topology, *wrappers, model="", config=None):
    around = {"parallel": [*wrappers], "schedule": {"use": "1f1b" if "pp" in topology else "accumulate"}}
    if model:
        around |= {"model": {**MODELS[model], "layers": 4}, "data": {"vocab": VOCAB}}
    config = {"lr": 0.02, **(config or {})}
    return Case("optimizer", use="muon", config=config, topology=topology, overrides=around)


FIRST = {
    "tp-zero1": muon({"dp": 2, "tp": 2}, TP, ZERO1),
    "ep-fsdp2": muon({"dp": 4, "ep": 2}, EP, FSDP2, model="moe"),
}
FULL = {
    "tp4-sp": muon({"tp": 4}, SP),
    "ddp": muon({"dp": 2}, DDP),
    "ddp-shared": muon({"dp": 2}, DDP, config=SHARE),
    "tp-ddp-shared": muon({"dp": 2, "tp": 2}, TP, DDP, config=SHARE),
    "zero2": muon({"dp": 4}, ZERO2),
    "one bucket": muon({"dp": 2}, {"use": "zero12"}),
    "pp-zero1": muon({"dp": 2, "pp": 2}, ZERO1),
    "pp-tp-zero1-shared": muon({"dp": 2, "pp": 2, "tp": 2}, TP, ZERO1, config=SHARE),
    "cp-zero1": muon({"dp": 2, "cp": 2}, CP, ZERO1),
    "fsdp2": muon({"dp": 4}, FSDP2),
    "tp-fsdp2": muon({"dp": 2, "tp": 2}, TP, FSDP2),
    "hsdp": muon({"dp": 4, "dp_shard": 2}, FSDP2),
    "hsdp-shared": muon({"dp": 4, "dp_shard": 2}, FSDP2, config=SHARE),
    "ep-ddp": muon({"dp": 2, "ep": 2}, EP, DDP, model="moe"),
    "ep-ddp-shared": muon({"dp": 4, "ep": 2}, EP, DDP, model="moe", config=SHARE),
    "ep-zero1": muon({"dp": 4, "ep": 2}, EP, ZERO1, model="moe"),
    "ep-etp-zero1": muon({"dp": 4, "ep": 2, "etp": 2}, TP, EP, ZERO1, model="moe"),
    "tp-ep-zero2": muon({"dp": 2, "tp": 2, "ep": 2}, TP, EP, ZERO2, model="moe"),
    "latent-sp-ep-zero1": muon({"dp": 2, "tp": 2, "ep": 2}, SP, EP, ZERO1, model="deepseek_v3"),
    "latent-pp-ep": muon({"dp": 2, "pp": 2, "ep": 2}, EP, DDP, model="deepseek_v3"),
    "latent-tp-original": muon({"tp": 2}, TP, model="deepseek_v2", config={"scale": "original"}),
}


@pytest.mark.parametrize(
    "case",
    [*FIRST.values(), *(pytest.param(case, marks=pytest.mark.full) for case in FULL.values())],
    ids=[*FIRST, *FULL],
)
def test_every_layout_has_the_weights_of_one_process(case):
    assert failed(case, "layout_changes_nothing") == {}


def orthogonalizer(run):
    return getattr(run.optimizer, "behind", run.optimizer).orthogonalizer


def work_of(case):
    """Return the FLOPs of each rank, by the dimensions along which matrices are exchanged."""
    return {span.dims: loads for span, loads in orthogonalizer(make_run(case, {})).flops.items()}


def test_experts_are_orthogonalized_where_they_are():
    """Those of different ranks are never made whole together, and work is divided where parts are."""
    (alone,) = run_ranks(work_of, 1, muon({}, model="moe"))
    found = run_ranks(work_of, 4, muon({"dp": 4, "ep": 2}, EP, ZERO1, model="moe"))
    assert {dims for each in found for dims in each} == {("dp",), ("edp",)}
    # Of the two experts' ranks along ep, each pair along edp has half of the experts.
    total = sum(found[0]["dp",]) + sum(sum(found[rank]["edp",]) for rank in (0, 1))
    assert total == sum(alone[()])
    for each in found:
        for loads in each.values():
            assert max(loads) < 1.5 * sum(loads) / len(loads)


@pytest.mark.parametrize(
    "case",
    [
        muon({}),  # in the dtype of the master weights, as on a CPU
        muon({"tp": 2}, TP),
        *(
            pytest.param(muon(*layout, **more), marks=pytest.mark.full)
            for layout, more in (
                (({"dp": 2}, ZERO1), {}),
                (({"dp": 2}, FSDP2), {}),
                (({"dp": 2}, DDP), {}),
                (({"dp": 2, "tp": 2}, TP, ZERO1), {}),
                (({"dp": 4, "ep": 2}, EP, ZERO1), {"model": "moe"}),
                (({"dp": 2, "pp": 2}, DDP), {}),
            )
        ),
    ],
)
def test_a_plan_knows_what_is_sent_and_held(case):
    """Which rank owns which matrix is known when ranks have asked one another: a plan has equal shares."""
    plans, reals = planned(case), happened(case)

    def exchanged(steps):
        sent = Counter()
        for step in steps:
            for when, each in step.collectives:
                if when == "after" and each.op == "all_to_all":
                    sent[len(each.ranks)] += each.bytes
        return sent

    assert exchanged(plans) == exchanged(reals)
    for plan, real in zip(plans, reals, strict=True):
        assert len(plan.collectives) == len(real.collectives)
        assert plan.state["optimizer"] == real.state["optimizer"]
    peaks = (max(step.peak for step in steps) for steps in (plans, reals))
    assert next(peaks) == pytest.approx(next(peaks), rel=0.02)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (muon({"dp": 2}, ZERO1), muon({"tp": 2}, TP)),
        pytest.param(muon({"tp": 2}, TP), muon({"dp": 2}, FSDP2), marks=pytest.mark.full),
        pytest.param(
            muon({"dp": 4, "ep": 2}, EP, ZERO1, model="moe"), muon({"dp": 2}, DDP, model="moe"),
            marks=pytest.mark.full,
        ),
    ],
    ids=["zero1 to tp", "tp to fsdp2", "ep-zero1 to ddp"],
)  # fmt: skip
def test_another_layout_goes_on_from_a_checkpoint(one, other, tmp_path: Path):
    """Weights and state after six steps are those of one process, whichever layout took the last three."""
    steps = {"run": {"steps": 6}, "precision": {"use": "fp64"}}
    (alone,) = run_ranks(train, 1, one.alone(), steps)
    early = {**steps, "run": {"steps": 3}}
    run_ranks(train, one.world_size, one, early, folder=tmp_path, save_at=3)
    resumed = run_ranks(train, other.world_size, other, steps, folder=tmp_path, resume="3")
    for held in ("weights", "state"):
        got, want = (whole([getattr(trace, held) for trace in traces]) for traces in (resumed, [alone]))
        assert_same(got, want, f"{held} after 6 steps", atol=1e-9)


def test_masters_whose_errors_a_momentum_carries_are_refused_before_a_process_starts(capsys):
    """What is added to a momentum that is orthogonalized does not arrive."""
    eco = ["check", "laptop", "--set", "optimizer.use=muon", "--set", "precision.use=fp4_master"]
    assert main([*eco, "--set", "precision.variant=eco"]) == Exit.USER
    told = capsys.readouterr().err
    assert re.search(r"optimizer.use: 'eco' .* which 'muon' declares that it cannot; expected another", told)
    assert main(eco) == Exit.DONE


def roles(case):
    run = make_engine(case, {}).run
    return {
        placed.placement.name: placed.placement.role and placed.placement.role.name for placed in run.placed
    }


def test_placements_say_the_roles_of_parameters_on_every_layout():
    alone = roles(example("model", "alibi", config=ALIBI))
    assert alone["embed.weight"] == "VOCAB"
    assert alone["head.weight"] == "HEAD"
    assert alone["layers.0.q.weight"] == "COLUMN"
    assert alone["layers.1.norm_1.weight"] == "NORM"
    case = example("model", "alibi", config=ALIBI, topology={"tp": 2}, overrides=SUMMED_TP)
    assert run_ranks(roles, 2, case) == [alone, alone]


def elements_of_state(case):
    """Return the elements of a rank's state after a step, by what it is."""
    engine, found = make_engine(case, {"run": {"steps": 1}}), Counter()
    engine.fit()
    for block in engine.run.optimizer.blocks():
        found[block.name.partition("/")[0]] += block.tensor.numel()
    return found


def test_zero12_shards_the_momentum_and_the_moments():
    (whole_state,) = run_ranks(elements_of_state, 1, muon({}))
    halves = run_ranks(elements_of_state, 2, muon({"dp": 2}, ZERO1))
    for state in ("momentum", "exp_avg", "exp_avg_sq"):
        assert sum(found[state] for found in halves) == whole_state[state]
        assert max(found[state] for found in halves) < 0.6 * whole_state[state]


@pytest.mark.full
@pytest.mark.parametrize("sync", ["ddp", "zero12"])
def test_a_sweep_has_the_matrix_products_of_an_update_in_proportion(sync, tmp_path):
    """A probe of few layers tells what a stage's update takes. Without that, it was a tenth of a step off."""
    path = tmp_path / "synced.toml"
    path.write_text(SYNCED.replace("{more}", f'[[parallel]]\nuse = "{sync}"\n[optimizer]\nuse = "muon"\n'))
    found = resolve_recipe(str(path), overrides=["schedule.use=1f1b", "batch.sequences=8"])
    composer = Composer(found.registry, find_hardware("h100"))
    estimate = composer.estimate(found.recipe, found.layout).time
    whole_plan = make_plan(found.recipe, found.registry, found.layout, composer.hardware).time
    assert estimate.seconds == pytest.approx(whole_plan.seconds, rel=0.02)
    assert estimate.after == pytest.approx(whole_plan.after, rel=0.2)
