"""fsdp2 passes the harness: shards of rows train as whole tensors do."""

import pytest

from nanotrain_core.testing import Case, conformance


def case(topology, config=None, name="", **around):
    config = config or {}
    overrides = {"parallel": [{"use": "fsdp2", **config}], **around}
    return Case("parallel", use="fsdp2", config=config, topology=topology, overrides=overrides, name=name)


KEPT = {"reshard_after_forward": False}
RECOMPUTED = {"parallel": [{"use": "recompute"}, {"use": "fsdp2"}]}

#: Checks whose first tier is that of ddp, which torch's shards do not change.
OF_ANY_GRADIENT_SYNC = (
    "gradients_equal[fp32]",
    "inner_shared_and_biased_layers",
    "mixed_dtypes",
    "monitors_see_gradients",
    "unused_parameter_does_not_hang[nowhere]",
    "weights_equal[sgd]",
)

test_conformance = conformance(
    case({"dp": 2}),
    # The first tier has them of ddp and zero12.
    slow=pytest.mark.full,
    marks=dict.fromkeys(OF_ANY_GRADIENT_SYNC, pytest.mark.full),
)
test_exhaustively = pytest.mark.full(
    conformance(
        case({"dp": 4}),
        case({"dp": 2}, KEPT, "kept"),
        case({"dp": 2}, name="recompute", **RECOMPUTED),
        case({"dp": 4, "dp_shard": 2}),
        case({"dp": 4, "dp_shard": 2}, KEPT, "hybrid-kept"),
    )
)
