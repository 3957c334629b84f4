"""Plans of small recipes against what happens on gloo: state, every collective, activations, peak memory."""

import attrs
import pytest
from compositions import MODELS, OPTIMIZERS, VOCAB
from fp8_models import DEEPSEEK
from planned import happened, planned, planned_memory

from nanotrain_core.testing import Case

#: Three microbatches on each of two data-parallel ranks, and rows of tokens that experts divide.
BATCH = {"sequences": 6, "microbatch": 1, "length": 8}

#: Bytes of loss terms, which a step adds up beside its activations.
LOSSES = 16

#: Bytes of losses, norms and counts (of experts' tokens, too) of a step that a run still has in the next one.
SCALARS = 512

DDP = [{"use": "ddp", "bucket_mb": 0.01}]
TP, SP = [{"use": "tp", "sequence_parallel": False}], [{"use": "tp", "sequence_parallel": True}]
GATHER_AGAIN = [{"use": "tp", "gather_again": True}]
EP = [{"use": "ep_deepseek"}]
CP_GATHER = {"use": "cp", "communication": "all_gather"}
CP_RING = {"use": "cp", "communication": "ring"}
ZERO = {"use": "zero12", "bucket_mb": 0.01}

CASES = {
    "ddp": ({"dp": 2}, "transformer", "accumulate", DDP, {}),
    "sequence_parallel": ({"tp": 2}, "transformer", "accumulate", SP, {}),
    "zero2": ({"dp": 2}, "transformer", "accumulate", [], {**ZERO, "stage": 2}),
    "pp": ({"pp": 2}, "transformer", "1f1b", [], {}),
    "ep": ({"dp": 2, "ep": 2}, "deepseek_v3", "accumulate", EP, {}),
}
MORE = {
    "zero1": ({"dp": 2}, "transformer", "accumulate", [], {**ZERO, "stage": 1}),
    "tp": ({"tp": 2}, "transformer", "accumulate", TP, {}),
    "gather_again": ({"tp": 2}, "deepseek_v3", "accumulate", GATHER_AGAIN, {}),
    "w_passes": ({"pp": 2}, "transformer", "zb_h1", [], {}),
    "recompute": ({"dp": 2}, "transformer", "accumulate", [{"use": "recompute"}, *DDP], {}),
    "selective": (
        {"tp": 2},
        "transformer",
        "accumulate",
        [*SP, {"use": "recompute", "granularity": "selective"}],
        {},
    ),
    "all": ({"pp": 2, "tp": 2, "dp": 2, "ep": 2}, "deepseek_v3", "1f1b", [*SP, *EP], {**ZERO, "stage": 1}),
    "tied": ({"pp": 2, "dp": 2}, "transformer", "1f1b", DDP, {}),
    "optimizer_offload": ({"dp": 2}, "transformer", "accumulate", [], {**ZERO, "stage": 2, "offload": True}),
    "phases": ({"dp": 2}, "transformer", "accumulate", DDP, {}),
    "windows": ({"pp": 2}, "windows", "1f1b", [], {}),
    "cp": ({"cp": 2}, "transformer", "accumulate", [{"use": "cp"}, *DDP], {}),
    "cp_gather": ({"cp": 2}, "transformer", "accumulate", [CP_GATHER, *DDP], {}),
    "cp_ring": ({"cp": 3}, "transformer", "accumulate", [CP_RING, *DDP], {}),
    "cp_ring_experts": ({"cp": 2, "ep": 2}, "deepseek_v3", "accumulate", [CP_RING, *EP, *DDP], {}),
    "cp_ring_pipeline": ({"cp": 2, "pp": 2}, "transformer", "1f1b", [CP_RING, *DDP], {}),
    "moe": ({"pp": 2, "tp": 2, "ep": 2}, "moe", "1f1b", [*SP, *EP, *DDP], {}),
    "cp_gather_experts": ({"cp": 2, "ep": 2}, "deepseek_v3", "accumulate", [CP_GATHER, *EP, *DDP], {}),
}
#: Blocks of 64 tokens, of which the second one is shorter.
WINDOWS = {**MODELS["transformer"], "window": 40, "layer_types": ["sliding_attention", "full_attention"]}
#: A plan is of the largest batch, which the second step has: the first takes one sequence on each rank.
PHASES = [
    {"name": "small", "until_tokens": 16, "batch": {"sequences": 2}},
    {"name": "large", "until_tokens": 16 + 10 * 48},
]


def case(topology, model, schedule, wrappers, optimizer, tied=False, precision="fp32", phases=()):
    uneven = "cp" in topology and "ep" not in topology
    length = 7 if uneven else BATCH["length"]  # the second rank of cp has a token more
    length = 100 if model == "windows" else length
    overrides = {
        "batch": {**BATCH, "sequences": 3 * topology.get("dp", 1), "length": length},
        "model": {**(WINDOWS if model == "windows" else MODELS[model]), "layers": 4, "tied": tied},
        "data": {"vocab": VOCAB},
        "optimizer": optimizer or OPTIMIZERS["adamw"],
        "schedule": {"use": schedule},
        "precision": {"use": precision},
        "parallel": wrappers,
        **({"phase": phases} if phases else {}),
    }
    return Case("topology", use="grid", topology=topology, overrides=overrides)


def assert_as_planned(case, tolerance=0.01, peak_tolerance=0.04):
    real = happened(case)
    for rank, (plan, step) in enumerate(zip(planned(case), real, strict=True)):
        assert plan.state == step.state, f"rank {rank}"
        assert plan.collectives == step.collectives, f"rank {rank}"
        assert plan.kept.keys() == step.kept.keys()
        for action, size in step.kept.items():
            assert plan.kept[action] == pytest.approx(size, rel=tolerance, abs=LOSSES), (
                f"rank {rank}: {action}"
            )
        assert plan.peak == pytest.approx(step.peak, rel=peak_tolerance), f"rank {rank}"
        assert plan.buffers == pytest.approx(step.buffers, abs=SCALARS), f"rank {rank}"
    for ranks, (peak, between) in planned_memory(case).items():
        most = max(real[rank].peak for rank in ranks)
        assert peak == pytest.approx(most, rel=peak_tolerance), f"as printed, the most of ranks {ranks}"
        left = real[ranks[0]].buffers  # of others the ends of ZeRO's ranges may differ
        assert between == pytest.approx(left, abs=SCALARS), f"as printed, between steps, of ranks {ranks}"


@pytest.mark.full_cases("ep", "zero2", "ddp", "sequence_parallel")
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_as_planned(name):
    assert_as_planned(case(*CASES[name]))


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_every_step_is_as_planned(name, precision):
    assert_as_planned(
        case(
            *{**CASES, **MORE}[name],
            tied=name == "tied",
            phases=PHASES if name == "phases" else (),
            precision=precision,
        )
    )


@pytest.mark.full
def test_parts_of_sequences_that_pipelines_send_are_as_planned():
    """Of 7 tokens the first rank of tp has 3, and sends them to the first one of the next stage."""
    odd = case({"pp": 2, "tp": 2}, "transformer", "1f1b", SP, {})
    odd = attrs.evolve(odd, overrides={**odd.overrides, "batch": {**BATCH, "length": 7}})
    for plan, step in zip(planned(odd), happened(odd), strict=True):
        assert (plan.state, plan.collectives) == (step.state, step.collectives)


@pytest.mark.full
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("schedule", "precision"),
    [("zb_h1", "fp8_deepseek_v3"), ("dualpipe_v", "fp8_deepseek_v3"), ("zb_h1", "mxfp8")],
)
def test_what_waits_for_w_passes_in_fp8_is_as_planned(schedule, precision, recompute):
    """Widths are whole tiles, and a microbatch too."""
    overrides = {
        "batch": {"sequences": 6, "microbatch": 1, "length": 128},
        "model": {**DEEPSEEK, "layers": 4},
        "data": {"vocab": DEEPSEEK["vocab"]},
        "optimizer": OPTIMIZERS["adamw"],
        "schedule": {"use": schedule},
        "precision": {"use": precision},
        "parallel": [{"use": "recompute"}] if recompute else [],
    }
    assert_as_planned(Case("topology", use="grid", topology={"pp": 2}, overrides=overrides))
