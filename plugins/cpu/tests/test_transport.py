"""Who gets shared memory, and that where it cannot be had sockets do the same."""

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from nanotrain_cpu import shared_memory
from nanotrain_cpu.shared_memory import MEMORY
from nanotrain_cpu.transport import CACHED, SharedBuckets, SharedBuffer, SharedMemoryTransport

from nanotrain_core.layout.buckets import GroupBuckets
from nanotrain_core.layout.exchange import Exchange, GroupBuffer
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.testing import run_ranks

CPU, LIMIT = torch.device("cpu"), 8 * CACHED


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


def metrics_are_reduced():
    """Return how many collectives of the process group a logged step's metrics take, and what they give."""
    mesh = Mesh(
        Layout({"dense": View(("dp",), (2,))}), rank=dist.get_rank(), transport=SharedMemoryTransport()
    )
    sums, most = torch.ones(3), torch.full((2,), float(mesh.rank))
    mesh.all_reduce_sum_and_max(sums, most)  # opens what they share
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls:
        mesh.all_reduce_sum_and_max(sums, most)
    return calls.call_count, mesh.waits.collectives.seconds > 0, sums.tolist(), most.tolist()


def test_metrics_do_not_wake_the_threads_of_sockets():
    expected = (0, True, [4.0] * 3, [1.0] * 2)
    assert run_ranks(metrics_are_reduced, 2, check_collectives=False) == [expected] * 2


def on_a_device():
    return type(SharedMemoryTransport().exchange(dist.group.WORLD, torch.device("cuda"), 60.0))


def test_on_a_gpu_it_does_what_the_cores_does():
    assert run_ranks(on_a_device, 1) == [Exchange]
