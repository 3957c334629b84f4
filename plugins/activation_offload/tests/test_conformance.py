"""Activation offload keeps what a parallel wrapper promises, alone and beside activation checkpointing."""

import pytest

from nanotrain_core.testing import Case, conformance

ALL = {"min_mb": 0.0, "keep": 0}
SUMMED = {"use": "summed"}
HALF = [{"use": "recompute", "every": 2}, {"use": "activation_offload", **ALL}, SUMMED]


def case(config, name, **around):
    overrides = {
        "parallel": [{"use": "activation_offload", **config}, SUMMED],
        "model": {"layers": 4},
        **around,
    }
    return Case(
        "parallel",
        use="activation_offload",
        config=config,
        topology={"dp": 2},
        overrides=overrides,
        name=name,
    )


test_conformance = conformance(
    case(ALL, "all"),
    # The first tier has them of ddp and zero12.
    slow=pytest.mark.full,
)
test_exhaustively = pytest.mark.full(
    conformance(case({"min_mb": 0.0, "keep": 2}, "two-kept"), case(ALL, "with-recompute", parallel=HALF))
)
