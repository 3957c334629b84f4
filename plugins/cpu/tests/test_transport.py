"""Who gets shared memory, and that where it cannot be had sockets do the same."""

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from nanotrain_cpu import shared_memory
from nanotrain_cpu.shared_memory import MEMORY
from nanotrain_cpu.transport import CACHED, SharedBuckets, SharedBuffer, SharedMemoryTransport
from nanotrain_ddp import DataParallelConfig
from nanotrain_ddp.wrapper import DataParallel
from torch import nn

from nanotrain_core.layout.buckets import GroupBuckets
from nanotrain_core.layout.exchange import Exchange, GroupBuffer
from nanotrain_core.layout.transport import Transport
from nanotrain_core.script import adapt
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_run

CPU, LIMIT = torch.device("cpu"), 8 * CACHED


def in_a_recipe(kernels):
    """Return the transport of a run, and what its first bucket of gradients lies in."""
    case = Case("parallel", use="ddp", topology={"dp": 2}, overrides={"kernels": kernels})
    run = make_run(case, {})
    return type(run.mesh.transport), type(run.gradients.buckets[0].buffer)


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
    return type(run.mesh.transport), type(run.gradients.buckets[0].buffer)


def test_a_script_gets_what_auto_would_take():
    assert run_ranks(in_a_script, 2) == [(SharedMemoryTransport, SharedBuffer)] * 2


def kinds(*, missing):
    """Return what an exchange offers, and a sum made with it."""
    folder = Path("/nowhere") if missing and dist.get_rank() == 1 else MEMORY
    with mock.patch.object(shared_memory, "MEMORY", folder):
        exchange = SharedMemoryTransport().exchange(dist.group.WORLD, CPU, 60.0)
        buckets = exchange.buckets(LIMIT, least=64)
        offered = (
            exchange.in_background,
            type(exchange.buffer(3, torch.float32)),
            type(buckets),
            buckets.limit,
        )
        return *offered, exchange.all_reduce(torch.ones(1))().item()


SOCKETS, MAPPED = (
    (True, GroupBuffer, GroupBuckets, LIMIT, 2.0),
    (False, SharedBuffer, SharedBuckets, CACHED, 2.0),
)


@pytest.mark.parametrize(("missing", "expected"), [(True, SOCKETS), (False, MAPPED)])
def test_all_ranks_share_or_none(missing, expected):
    assert run_ranks(kinds, 2, missing=missing, check_collectives=False) == [expected] * 2


def on_a_device():
    return type(SharedMemoryTransport().exchange(dist.group.WORLD, torch.device("cuda"), 60.0))


def test_on_a_gpu_it_does_what_the_cores_does():
    assert run_ranks(on_a_device, 1) == [Exchange]
