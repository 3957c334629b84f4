"""ddp, and what several data-parallel ranks ask of the components beside it, pass the harness."""

from nanotrain_core.testing import Case, conformance

DDP = {"parallel": [{"use": "ddp"}]}
MANY_BUCKETS = {"bucket_mb": 0.01}

test_conformance = conformance(
    Case("parallel", use="ddp", config=MANY_BUCKETS, topology={"dp": 2}),
    Case("parallel", use="ddp", config={"overlap": False}, topology={"dp": 4}),
    Case("schedule", use="accumulate", topology={"dp": 2}, overrides=DDP),
    Case("optimizer", use="adamw", topology={"dp": 2}, overrides=DDP),
    Case("precision", use="fp16", topology={"dp": 2}, overrides=DDP),
    Case("checkpoint", use="simple", topology={"dp": 2}, overrides=DDP),
    Case("monitor", use="replicas", topology={"dp": 2}, overrides=DDP),
)
