"""Exchanges through shared memory are exact, leave nothing behind, and are given up by all ranks or none."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random
from time import sleep
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from nanotrain_cpu import shared_memory
from nanotrain_cpu.barrier import HostBarrier
from nanotrain_cpu.shared_memory import (
    MEMORY,
    NEW,
    PREFIX,
    SharedBuffers,
    SharedRing,
    all_gather,
    reduce_scatter,
    sweep,
)
from structlog.testing import capture_logs

from nanotrain_core.testing.pool import run_ranks


def numbers(rank, numel):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def sum_twice(numel):
    """Return two sums of different numbers in the same buffers, and what is left of this rank's file."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        with mock.patch.object(shared_memory, "MEMORY", Path(folder)):
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
    with mock.patch.object(shared_memory, "MEMORY", missing):
        buffers = SharedBuffers.open(10, torch.float32, dist.group.WORLD)
        return buffers is None, SharedRing.open(64, dist.group.WORLD) is None


def test_if_one_rank_cannot_share_none_does():
    assert run_ranks(open_where_rank_one_cannot, 3) == [(True, True)] * 3


def open_twice_where_rank_one_cannot():
    shared_memory._told.clear()
    with capture_logs() as logs:
        open_where_rank_one_cannot()
    return [(line["log_level"], line["ranks"], line["folder"], line["wanted"]) for line in logs]


def test_the_slower_way_is_told_once():
    """A run in a container with a small /dev/shm would be slow without a word."""
    (line,), *others = run_ranks(open_twice_where_rank_one_cannot, 3)
    assert line == ("warning", "1", str(MEMORY), 64 + HostBarrier.size(3))
    assert others == [[], []]


#: A rank that has made its file, says so, and never gets to open the others'.
RANK = """
import sys, time
from pathlib import Path
from nanotrain_cpu import shared_memory
shared_memory.MEMORY = Path(sys.argv[1])
file = shared_memory._create(4096)
print(file.name, flush=True)
time.sleep(1000)
"""


@pytest.mark.full
def test_the_file_of_a_killed_rank_is_swept_at_the_next_start_and_that_of_a_living_one_never(tmp_path):
    def start():
        command = [sys.executable, "-c", RANK, str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        return process, Path(process.stdout.readline().strip())

    def all_are_old():
        for path in tmp_path.iterdir():
            os.utime(path, (1, 1))

    (living, kept), (killed, left) = start(), start()
    try:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        others = tmp_path / "nanotrain-snapshots-1"
        others.touch()
        all_are_old()
        (tmp_path / f"{PREFIX}new").touch()
        last, own = start()
        assert {path.name for path in tmp_path.iterdir()} == {
            kept.name,
            own.name,
            others.name,
            f"{PREFIX}new",
        }
        assert left.name.startswith(PREFIX)
        last.kill()
        last.wait()
    finally:
        for process in (living, killed):
            process.kill()
            process.wait()
    all_are_old()
    sweep.cache_clear()
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [others.name]
    assert NEW >= 60


TURNS, CHUNK = 7, 4


def turn_ring():
    """Sum and gather TURNS times through one ring, each rank dawdling as it likes."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    ring = SharedRing.open(8 * CHUNK * ranks, dist.group.WORLD)
    mine, dawdle = slice(rank * CHUNK, (rank + 1) * CHUNK), Random(rank)
    sums = torch.full((TURNS, CHUNK), 7.0, dtype=torch.float64)
    gathered = torch.zeros(TURNS, CHUNK * ranks, dtype=torch.float64)
    for turn in range(TURNS):
        sleep(dawdle.random() / 200)
        wanted = numbers(100 * turn + rank, CHUNK * ranks)
        ring.begin().view(torch.float64)[: CHUNK * ranks] = wanted
        ring.send(
            lambda all_, turn=turn: reduce_scatter(all_, rank * CHUNK, sums[turn], add=turn == TURNS - 1)
        )
        ring.begin().view(torch.float64)[:CHUNK] = gathered[turn, mine] = wanted[mine]
        ring.send(lambda all_, turn=turn: all_gather(all_, gathered[turn], rank))
    ring.drain()
    return sums, gathered


def test_a_ring_carries_many_exchanges_whatever_the_pace_of_each_rank():
    for ranks in (2, 3):
        results = run_ranks(turn_ring, ranks)
        for turn in range(TURNS):
            each = torch.stack([numbers(100 * turn + rank, CHUNK * ranks) for rank in range(ranks)])
            before = 7.0 if turn == TURNS - 1 else 0.0
            for rank, (sums, gathered) in enumerate(results):
                mine = slice(rank * CHUNK, (rank + 1) * CHUNK)
                expected = before + each[:, mine].sum(0)
                torch.testing.assert_close(torch.as_tensor(sums)[turn], expected, rtol=0, atol=1e-14)
                diagonal = torch.cat([each[r, r * CHUNK : (r + 1) * CHUNK] for r in range(ranks)])
                assert torch.equal(torch.as_tensor(gathered)[turn], diagonal)
