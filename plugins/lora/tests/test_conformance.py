"""lora passes the harness: adapters train as in one process, beside layers that are whole or split."""

import pytest

from nanotrain_core.testing import Case, conformance


def case(topology, *around, config=None, name="", **overrides):
    config = config or {"rank": 4}
    tables = {"parallel": [*around, {"use": "lora", **config}], **overrides}
    return Case("parallel", use="lora", config=config, topology=topology, overrides=tables, name=name)


SUMMED, SLICED, SPREAD = ({"use": name} for name in ("summed", "sliced", "spread"))

#: Checks whose first tier is that of other wrappers, or of test_adapters.py.
ELSEWHERE = (
    "accumulation_changes_nothing",
    "any_number_of_microbatches",
    "collectives_in_one_order",
    "gradients_equal[fp32]",
    "gradients_equal[fp64]",
    "inner_shared_and_biased_layers",
    "mixed_dtypes",
    "monitors_see_gradients",
    "twenty_steps_are_those_of_one_process",
    "weights_equal[sgd]",
)

test_conformance = conformance(
    case({"tp": 2}, SLICED), slow=pytest.mark.full, marks=dict.fromkeys(ELSEWHERE, pytest.mark.full)
)
test_exhaustively = pytest.mark.full(
    conformance(
        case({}),
        case({"dp": 2}, SUMMED, config={"rank": 3, "rslora": True, "targets": ["attn", "up"]}, name="some"),
        case({"tp": 4}, SLICED),
        case({"tp": 2, "dp": 2}, {"use": "recompute"}, SLICED, SUMMED, name="recompute"),
        case({"dp": 2, "ep": 2}, SPREAD, name="experts", model={"use": "routed"}),
    )
)
