"""What ranks exchange that hold different shares: every collective of a plan against those of gloo."""

import pytest
from compositions import MODELS, VOCAB
from planned import happened, planned

from nanotrain_core.testing import Case

SP, EP = {"use": "tp", "sequence_parallel": True}, {"use": "ep_deepseek"}
MUON = {"use": "muon", "lr": 0.02}
ADAMW = {"use": "adamw", "lr": 0.01}
ZERO = {"use": "zero12", "stage": 2, "bucket_mb": 0.0013}
#: Matrices of three rows or columns, fewer elements than a bucket has for one rank.
LORA = {"use": "lora", "rank": 3}
FSDP = {"use": "fsdp2"}
ONE_STAGE = {"schedule": {"use": "1f1b", "layers": [2, 0]}}
WINDOW = {"model": {**MODELS["transformer"], "layers": 1, "window": 3}}

CASES = {
    # Of five sequences one rank has two, and its peer sends it rows of three.
    "sequences": ({"dp": 2, "ep": 2}, "deepseek_v3", [EP], ADAMW, {"sequences": 5, "microbatch": 3}),
    # Buckets end within matrices, and each of three ranks has a range of every bucket.
    "ranges": ({"dp": 3}, "transformer", [ZERO], MUON, {"sequences": 3}),
}
MORE = {
    "last_microbatch": ({"dp": 2, "ep": 2}, "moe", [EP], ADAMW, {"sequences": 7, "microbatch": 2}),
    "tokens": ({"tp": 2, "ep": 2}, "deepseek_v3", [SP, EP], ADAMW, {"sequences": 2, "length": 7}),
    "parts": ({"cp": 2, "ep": 2}, "moe", [{"use": "cp"}, EP], ADAMW, {"sequences": 2, "length": 7}),
    # Ranks with one coordinate of etp compute with the rows that the other one received.
    "widths": ({"dp": 4, "ep": 2, "etp": 2}, "moe", [EP], ADAMW, {"sequences": 6, "microbatch": 2}),
    "few_ranges": ({"dp": 2, "ep": 2}, "moe", [EP, LORA, ZERO], {**MUON, "share_replicas": True}, {}),
    "columns": ({"tp": 2}, "transformer", [SP, LORA], MUON, {}),
    "chunks": ({"dp": 3}, "transformer", [FSDP], MUON, {"sequences": 3}),
    "chunks_of_columns": ({"dp": 2, "tp": 2}, "transformer", [SP, FSDP], MUON, {}),
    # Gradients are sent with the second microbatch: in a first pass tp computes some of them earlier.
    "ranges_of_columns": (
        {"dp": 2, "tp": 2},
        "transformer",
        [SP, {**ZERO, "stage": 1}],
        MUON,
        {"microbatch": 1},
    ),
    "experts": ({"dp": 4, "ep": 2, "etp": 2}, "deepseek_v3", [EP, ZERO], MUON, {}),
    # The second stage has a head, and no layer that adapters are for.
    "adapters": ({"pp": 2}, "moe", [LORA], MUON, {}, ONE_STAGE),
    # Of four ranks with two tokens each: halves of a part are one query, which sees its window whole.
    "windows": ({"cp": 4}, "transformer", [{"use": "cp", "communication": "all_gather"}], ADAMW, {}, WINDOW),
}


def assert_exchanged_as_planned(topology, model, wrappers, optimizer, batch, more=None):
    case = Case(
        "topology",
        use="grid",
        topology=topology,
        overrides={
            "batch": {"sequences": 4, "microbatch": 2, "length": 8, **batch},
            "model": {**MODELS[model], "layers": 2, "vocab": VOCAB if "tp" not in topology else VOCAB - 1},
            "data": {"vocab": VOCAB - 1},
            "optimizer": optimizer,
            "schedule": {"use": "accumulate"},
            "precision": {"use": "fp32"},
            "parallel": wrappers,
            **(more or {}),
        },
    )
    for rank, (plan, step) in enumerate(zip(planned(case), happened(case), strict=True)):
        assert plan.collectives == step.collectives, f"rank {rank}"


@pytest.mark.parametrize("name", CASES)
def test_unequal_shares_are_exchanged_as_planned(name):
    assert_exchanged_as_planned(*CASES[name])


@pytest.mark.full
@pytest.mark.parametrize("name", MORE)
def test_all_unequal_shares_are_exchanged_as_planned(name):
    assert_exchanged_as_planned(*MORE[name])
