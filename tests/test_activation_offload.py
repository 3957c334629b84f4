"""Activation offload beside other wrappers, precisions and ``torch.compile``: the numbers of one process."""

import pytest
from as_one_process import assert_trains_as_one_process
from compositions import BATCH, MODELS, OPTIMIZERS, VOCAB, compiled

from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import train

OFFLOAD = {"use": "activation_offload", "min_mb": 0.0, "keep": 0}
HALF = {"use": "recompute", "every": 2}
LAYOUTS = {
    "experts": ({"pp": 2, "dp": 2, "ep": 2}, "deepseek_v3", "zb_h1", [{"use": "ep_deepseek"}, OFFLOAD]),
    "recompute": ({"tp": 2}, "transformer", "accumulate", [{"use": "tp"}, HALF, OFFLOAD]),
}


def case(topology, model, schedule, wrappers):
    overrides = {
        "batch": {**BATCH, "microbatch": 2},
        "model": {**MODELS[model], "layers": 4},
        "data": {"vocab": VOCAB},
        "optimizer": OPTIMIZERS["sgd"],
        "schedule": {"use": schedule},
        "parallel": wrappers,
    }
    return Case("topology", use="grid", topology=topology, overrides=overrides)


@pytest.mark.full_cases("experts", "recompute")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_trains_as_one_process(layout):
    assert_trains_as_one_process(case(*LAYOUTS[layout]))


def test_packed_weights_change_no_bit():
    """They have no storage of their own, by which a layer's weights are told from what it saves."""
    packed = {"precision": {"use": "fp4_master", "variant": "naive"}, "run": {"steps": 1}}
    with_it, without = (
        train(case({}, "transformer", "accumulate", wrappers), packed) for wrappers in ([OFFLOAD], [])
    )
    norms = [[report.grad_norm for report in trace.reports] for trace in (with_it, without)]
    assert norms[0] == norms[1] != [0.0]


@pytest.mark.full
def test_it_trains_as_one_process_compiled():
    assert_trains_as_one_process(compiled(case({"dp": 2}, "transformer", "accumulate", [OFFLOAD])))
