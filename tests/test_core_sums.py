"""Without a component that provides ``gradient_sync`` the core adds up what is partial: as in one process.

Loss terms, gradients, their norm, and the weights after 3 clipped steps of SGD, in float64 to 1e-9.
"""

import pytest
import torch
import torch.distributed as dist
from as_one_process import assert_trains_as_one_process
from compositions import BATCH, MODELS, OPTIMIZERS, VOCAB
from torch import nn

from nanotrain_core.layout.gradients import AllReduceGradients
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import place, placed_parameters
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.collectives import CollectiveLog


def case(topology, *wrappers, model="transformer", schedule="accumulate", **changes):
    overrides = {
        "batch": {**BATCH, "microbatch": 2},
        "model": {**MODELS[model], "layers": 2, **changes},
        "data": {"vocab": VOCAB},
        "optimizer": OPTIMIZERS["sgd"],
        "schedule": {"use": schedule},
        "parallel": [*wrappers],
    }
    return Case("topology", use="grid", topology=topology, overrides=overrides)


TP = {"use": "tp"}
WHOLE = {"use": "tp", "sequence_parallel": False}
EXPERTS = {"use": "ep_deepseek"}

CASES = {
    "sequence parallel": case({"tp": 2}, TP),
    "fewer key heads than ranks": case({"tp": 4}, WHOLE),
    "experts under tp": case({"tp": 2}, TP, model="deepseek_v3", mtp=0),
    "tied over stages": case({"pp": 2}, schedule="1f1b", tied=True),
    "further tokens over stages": case({"pp": 2}, schedule="1f1b", model="deepseek_v3"),
    "data": case({"dp": 2}),
}
EVERYTHING = case(
    {"pp": 2, "dp": 2, "tp": 2, "ep": 2}, TP, EXPERTS, schedule="zb_h1", model="deepseek_v3", tied=True
)


@pytest.mark.full
def test_every_dimension_at_once_trains_as_one_process():
    assert_trains_as_one_process(EVERYTHING)


@pytest.mark.full_cases("experts under tp", "fewer key heads than ranks", "further tokens over stages")
@pytest.mark.parametrize("composed", CASES.values(), ids=CASES)
def test_layouts_without_a_gradient_sync_train_as_one_process(composed):
    assert_trains_as_one_process(composed)


def summed(limit):
    """Return what a rank gets for its bfloat16 weights, in float32, of gradients 256 and 1 on two ranks."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(4, 2, dtype=torch.bfloat16) for _ in range(3)))
    module[1].weight.requires_grad_(requires_grad=False)
    mesh = Mesh(Layout({"dense": View(("dp",), (2,))}), rank=dist.get_rank())
    gradients = AllReduceGradients()
    gradients.LIMIT = limit
    gradients.attach(placed_parameters([module], place([module], mesh.layout)), mesh, torch.float32)
    found = []
    for _ in range(2):  # steps
        for _ in range(3):  # microbatches; the last layer is reached by none
            reached = (*module[0].parameters(), module[1].bias)
            sum(p.sum() * (256.0, 1.0)[mesh.rank] for p in reached).backward()
        with CollectiveLog() as log:
            gradients.finish()
        found += [gradients.gradient(p) for p in module.parameters() if p.requires_grad]
        gradients.zero()
    return found, len(log.entries)


@pytest.mark.parametrize(("limit", "collectives"), [(1, 5), (2**20, 1), (48, 2)])
def test_sums_are_of_all_microbatches_in_the_runs_dtype_and_few(limit, collectives):
    """bfloat16 would not see 3 beside 768. What no backward reached is zero, what is frozen is left alone."""
    for found, calls in run_ranks(summed, 2, limit):
        assert calls == collectives
        assert all(gradient.dtype == torch.float32 for gradient in found)
        assert [set(gradient.flatten().tolist()) for gradient in found] == 2 * [*3 * [{771.0}], *2 * [{0.0}]]
