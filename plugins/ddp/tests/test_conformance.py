"""ddp, and what several data-parallel ranks ask of the components beside it, pass the harness."""

from itertools import product

import pytest

from nanotrain_core.testing import Case, conformance

DDP = {"parallel": [{"use": "ddp"}]}
MANY_BUCKETS = {"bucket_mb": 0.01}
SOCKETS = {"kernels": {"use": "torch"}}

test_conformance = conformance(
    Case("parallel", use="ddp", config=MANY_BUCKETS, topology={"dp": 2}),
    Case("schedule", use="accumulate", topology={"dp": 2}, overrides=DDP),
    # zero12 has it in the first tier.
    marks={"twenty_steps_are_those_of_one_process": pytest.mark.full},
)
test_beside = conformance(
    Case("parallel", use="ddp", config=MANY_BUCKETS, topology={"dp": 2}, overrides=SOCKETS, name="sockets"),
    Case("monitor", use="replicas", topology={"dp": 2}, overrides=DDP),
    slow=pytest.mark.full,
    # The first tier has it of one rank.
    marks={"changes_nothing": pytest.mark.full},
)

GPT = {"positions": "learned", "max_length": 16, "norm": "layernorm", "activation": "gelu", "bias": True}
MODELS = (
    {**GPT, "tied": True},
    {**GPT, "kv_heads": 1},
    {"kv_heads": 2, "tied": True},
    {"layers": 1, "heads": 2, "head_size": 12},
)

CONFIGS = ((MANY_BUCKETS, {}), (MANY_BUCKETS, SOCKETS), ({"overlap": False}, SOCKETS))

# Every world size with every shape of model and with every config, and every component that has ranks to
# serve beside ddp.
test_exhaustively = pytest.mark.full(
    conformance(
        *(
            Case(
                "parallel",
                use="ddp",
                config=config,
                topology={"dp": dp},
                overrides={"model": model, "batch": {"sequences": 16}, **kernels},
            )
            for (turn, dp), (shape, model) in product(enumerate((2, 4, 8)), enumerate(MODELS))
            for config, kernels in (CONFIGS[(turn + shape) % len(CONFIGS)],)
        ),
        *(
            Case("optimizer", use=use, config=config, topology={"dp": dp}, overrides=DDP)
            for dp in (2, 4)
            for use, config in (("adamw", {}), ("sgd", {"momentum": 0.9}), ("sgd", {}))
        ),
        *(
            Case("precision", use=use, topology={"dp": dp}, overrides=DDP)
            for dp, use in product((2, 4), ("fp64", "fp32", "bf16", "fp16"))
        ),
        *(
            Case("monitor", use=use, topology={"dp": 2}, overrides=DDP)
            for use in ("console", "jsonl", "replicas")
        ),
        Case("checkpoint", use="simple", topology={"dp": 4}, overrides=DDP),
        Case("schedule", use="accumulate", topology={"dp": 4}, overrides=DDP),
    )
)
