"""Sums through shared memory equal sums, leave nothing behind, and are given up by all ranks or none."""

import tempfile
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from nanotrain_ddp import shared
from nanotrain_ddp.shared import MEMORY, SharedBuffers

from nanotrain_core.testing.pool import run_ranks


def numbers(rank, numel):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def sum_twice(numel):
    """Return two sums of different numbers in the same buffers, and what is left of this rank's file."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        with mock.patch.object(shared, "MEMORY", Path(folder)):
            buffers = SharedBuffers.open(numel, torch.float64, dist.group.WORLD)
        left = list(Path(folder).iterdir())
    sums = []
    for offset in (0, 100):
        buffers.mine.copy_(numbers(dist.get_rank() + offset, numel))
        buffers.all_reduce()
        sums.append(buffers.mine.clone())
    return [*sums, len(left)]


def test_every_rank_gets_the_same_bits_of_the_sum():
    for ranks, numel in ((2, 1000), (3, 10), (4, 2)):
        results = run_ranks(sum_twice, ranks, numel)
        for position, offset in enumerate((0, 100)):
            expected = torch.stack([numbers(rank + offset, numel) for rank in range(ranks)]).sum(0)
            for result in results:
                torch.testing.assert_close(torch.as_tensor(result[position]), expected, rtol=0, atol=1e-14)
                assert torch.equal(torch.as_tensor(result[position]), torch.as_tensor(results[0][position]))
        assert [result[2] for result in results] == [0] * ranks


def open_where_rank_one_cannot():
    missing = Path("/nowhere") if dist.get_rank() == 1 else MEMORY
    with mock.patch.object(shared, "MEMORY", missing):
        return SharedBuffers.open(10, torch.float32, dist.group.WORLD) is None


def test_if_one_rank_cannot_share_none_does():
    assert run_ranks(open_where_rank_one_cannot, 3) == [True, True, True]
