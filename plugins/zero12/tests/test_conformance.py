"""zero12 passes the harness in both stages, through every transport there is on CPU."""

from itertools import product

import pytest

from nanotrain_core.testing import Case, conformance

#: Several buckets in a model of 100 kB.
SMALL = {"bucket_mb": 0.01, "weight_decay": 0.1}
SOCKETS = {"use": "torch"}
ZERO = {"optimizer": {"use": "zero12", **SMALL, "stage": 2}}


def case(stage, config, topology, name="", kernels=None):
    batch = {"sequences": max(8, 2 * topology.get("dp", 1))}
    around = {"batch": batch, "kernels": kernels or {"use": "auto"}}
    config = {**config, "stage": stage}
    return Case("optimizer", use="zero12", config=config, topology=topology, overrides=around, name=name)


test_conformance = conformance(
    case(2, SMALL, {"dp": 2}, "stage2"),
    # The first tier has them of the core's `adamw`.
    marks={
        "lost_weights_are_carried_or_refused": pytest.mark.full,
        "resumed_twice_is_the_same_run": pytest.mark.full,
        # And these of ddp.
        "any_number_of_microbatches": pytest.mark.full,
        "a_parameter_may_be_used_later[from_the_second_step]": pytest.mark.full,
    },
)

# The first tier has its gradients through sockets in test_parallel_checks.py.
test_sockets = pytest.mark.full(
    conformance(case(2, {**SMALL, "overlap": False}, {"dp": 2}, "sockets", SOCKETS))
)

#: Around the optimizers of others, here the harness's plain SGD.
BEHIND = {"stage": 2, "bucket_mb": 0.01}

test_around_other_optimizers = pytest.mark.full(
    conformance(
        Case("parallel", use="zero12", config=BEHIND, topology={"dp": 2}),
        Case("parallel", use="zero12", config={"stage": 1}, topology={"dp": 4}, name="stage1"),
        Case(
            "optimizer",
            use="adamw",
            topology={"dp": 2},
            overrides={"parallel": [{"use": "zero12", **BEHIND}]},
        ),
        Case(
            "precision", use="bf16", topology={"dp": 2}, overrides={"parallel": [{"use": "zero12", **BEHIND}]}
        ),
    )
)

test_exhaustively = pytest.mark.full(
    conformance(
        case(1, SMALL, {"dp": 2}, "stage1"),
        case(2, {**SMALL, "moment_dtype": "int8"}, {"dp": 2}, "int8"),
        *(
            case(stage, {**SMALL, "overlap": overlap}, {"dp": dp}, f"{stage}-{name}-{overlap}-{dp}", kernels)
            for (name, kernels), stage, overlap, dp in product(
                {"shm": None, "sockets": SOCKETS}.items(), (1, 2), (True, False), (2, 4, 8)
            )
        ),
        case(1, {}, {}, "alone"),
        case(2, {**SMALL, "moment_dtype": "bfloat16"}, {"dp": 2}, "narrow"),
        Case("precision", use="fp16", topology={"dp": 2}, overrides=ZERO),
        Case("monitor", use="replicas", topology={"dp": 2}, overrides=ZERO),
    )
)
