"""Tensors that several pipeline stages hold are summed and copied together, in whatever order they hold them.

A sum over two stages that one rank begins with a bias and another with a table adds numbers of different
parameters, or waits for ever. Held to one process in float64, after 3 steps.
"""

from pathlib import Path

import pytest
from as_one_process import assert_trains_as_one_process
from compositions import BATCH, OPTIMIZERS, VOCAB

from nanotrain_core.testing import Case

MODEL = {"use": "twice_tied", "tied": True, "layers": 2, "width": 32, "heads": 4, "vocab": VOCAB}
SYNCS = {
    "core": {},
    "ddp": {"parallel": [{"use": "ddp"}]},
    "ddp, a bucket for each": {"parallel": [{"use": "ddp", "bucket_mb": 1e-6}]},
    "zero12": {"optimizer": {"use": "zero12", "lr": 0.1, "stage": 2}},
}


@pytest.mark.full_cases("pp2 dp2-zero12", "pp2 dp2-ddp, a bucket for each", "pp2 dp2-core")
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize(
    "topology",
    [pytest.param({"pp": 2}, marks=pytest.mark.full), {"pp": 2, "dp": 2}],
    ids=["pp2", "pp2 dp2"],
)
def test_two_tensors_tied_in_different_orders_train_as_in_one_process(topology, sync):
    overrides = {
        "batch": {**BATCH, "microbatch": 2},
        "model": MODEL,
        "data": {"vocab": VOCAB},
        "optimizer": OPTIMIZERS["sgd"],
        "schedule": {"use": "1f1b"},
        **SYNCS[sync],
    }
    model = Path(__file__).with_name("twice_tied_model.py")
    case = Case("topology", use="grid", topology=topology, overrides=overrides, plugins=(model,))
    assert_trains_as_one_process(case)
