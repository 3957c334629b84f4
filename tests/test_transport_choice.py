"""A recipe, or for a script what is installed, chooses how ranks exchange."""

import pytest
import torch
from nanotrain_cpu.transport import SharedBuffer, SharedMemoryTransport
from nanotrain_ddp import DataParallelConfig
from nanotrain_ddp.data_parallel import DataParallel
from torch import nn

from nanotrain_core.layout.exchange import GroupBuffer
from nanotrain_core.layout.transport import Transport
from nanotrain_core.script import adapt
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_run, push


def in_a_recipe(kernels):
    """Return the transport of a run, and what its first bucket of gradients lies in."""
    case = Case("parallel", use="ddp", topology={"dp": 2}, overrides={"kernels": kernels})
    run = make_run(case, {})
    return type(run.mesh.transport), type(run.gradients.queue.buckets[0].buffer.behind)


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        ({"use": "auto"}, (SharedMemoryTransport, SharedBuffer)),
        ({"use": "cpu"}, (SharedMemoryTransport, SharedBuffer)),
        ({"use": "cpu", "shared_memory": False}, (Transport, GroupBuffer)),
        ({"use": "torch"}, (Transport, GroupBuffer)),
    ],
    ids=["auto", "cpu", "without", "torch"],
)
def test_a_recipe_chooses(kernels, expected):
    assert run_ranks(in_a_recipe, 2, kernels) == [expected] * 2


def in_a_script():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = adapt(model, optimizer, gradient_sync=DataParallel(DataParallelConfig()))
    return type(run.mesh.transport), type(run.gradients.queue.buckets[0].buffer.behind)


def test_a_script_gets_what_auto_would_take():
    assert run_ranks(in_a_script, 2) == [(SharedMemoryTransport, SharedBuffer)] * 2


def weights_in_flight(kernels):
    """Return how many buckets of updated weights still travel after a step of ZeRO."""
    zero = {"bucket_mb": 0.01, "stage": 2}
    run = make_run(
        Case(
            "optimizer",
            use="zero12",
            config=zero,
            topology={"dp": 2},
            overrides={"kernels": {"use": kernels}},
        ),
        {},
    )
    push(run, 0, 1.0)
    run.optimizer.step()
    return len(run.optimizer.gathering)


def test_weights_that_go_through_shared_memory_are_there_after_the_step():
    assert run_ranks(weights_in_flight, 2, "cpu") == [0, 0]
    assert min(run_ranks(weights_in_flight, 2, "torch")) > 0
