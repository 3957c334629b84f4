"""Collectives through shared memory are exact at every size, and end when a rank is lost."""

import mmap
import sys
from contextlib import suppress
from random import Random
from threading import Thread
from time import sleep
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from nanotrain_cpu import barrier, collectives
from nanotrain_cpu.barrier import GlooMeeting, HostBarrier
from nanotrain_cpu.collectives import HostCollectives
from nanotrain_cpu.shared_memory import SharedBuffers
from nanotrain_cpu.transport import SharedMemoryTransport

from nanotrain_core.models.activation_checkpointing import recompute
from nanotrain_core.testing.pool import RankFailure, run_ranks
from nanotrain_core.watch.hang import Beat, Stuck


def operands(seed, shape, dtype):
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (10 * numbers).to(dtype)


def exchange(buffer, shapes, dtype):
    """Return, for every shape, what the three collectives give, ranks dawdling as they like."""
    collectives.BUFFER = buffer
    ours = HostCollectives.open(dist.group.WORLD, 20.0)
    rank, dawdle, found = dist.get_rank(), Random(dist.get_rank()), []
    for number, shape in enumerate(shapes):
        x = operands(100 * number + rank, shape, dtype)
        shares = operands(100 * number + rank, (dist.get_world_size(), *shape), dtype)
        for collective, operand in (
            (ours.all_gather, x),
            (ours.all_reduce, x.mT if x.dim() > 1 else x),
            (ours.reduce_scatter, shares),
        ):
            sleep(dawdle.random() / 500)
            found.append(collective(operand))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_each_is_exact_whole_or_in_pieces(ranks, dtype):
    shapes = [(1,), (0,), (3, 5), (64,), (7, 9, 11), (1000,)]
    results = run_ranks(exchange, ranks, 512, shapes, dtype, check_collectives=False)
    for number, shape in enumerate(shapes):
        xs = [operands(100 * number + rank, shape, dtype) for rank in range(ranks)]
        shares = [operands(100 * number + rank, (ranks, *shape), dtype) for rank in range(ranks)]
        for rank, result in enumerate(results):
            gathered, reduced, scattered = map(torch.as_tensor, result[3 * number : 3 * number + 3])
            assert torch.equal(gathered, torch.stack(xs))
            assert torch.equal(reduced, in_order(x.mT if x.dim() > 1 else x for x in xs))
            assert torch.equal(scattered, in_order(each[rank] for each in shares))


def both_ways(dtype, sizes):
    """Return, for every size, what shared memory gives of sums and maxima, and what all-reduces give."""
    collectives.BUFFER = 2**14
    ours, found = HostCollectives.open(dist.group.WORLD, 20.0), []
    for size in sizes:
        sums, most = (operands(100 * size + dist.get_rank(), (n,), dtype) for n in (size, size // 3))
        expected = sums.clone(), most.clone()
        for x, op in zip(expected, (dist.ReduceOp.SUM, dist.ReduceOp.MAX), strict=True):
            dist.all_reduce(x, op=op)
        assert ours.all_reduce_sum_and_max(sums, most)
        found.append((sums, most, *expected))
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_sums_of_metrics_are_those_of_all_reduces_and_bitwise_the_same_on_all_ranks(ranks, dtype):
    sizes = (1, 2, 3, 2 * ranks, 2 * ranks + 1, 37, 361, 1000)
    first, *others = run_ranks(both_ways, ranks, dtype, sizes, check_collectives=False)
    rounding = 100 * ranks * torch.finfo(dtype).eps if dtype.is_floating_point else 0  # operands are about 10
    for number, each in enumerate(first):
        sums, most, summed, largest = map(torch.as_tensor, each)
        torch.testing.assert_close(sums, summed, rtol=0, atol=rounding)
        assert torch.equal(most, largest)
        assert all(torch.equal(sums, torch.as_tensor(found[number][0])) for found in others)


def through_sockets(sizes_and_dtypes):
    """Return which pairs are all-reduced by the process group, and whether results are right."""
    exchange, found = SharedMemoryTransport().exchange(dist.group.WORLD, torch.device("cpu"), 20.0), []
    for size, sums_dtype, most_dtype in sizes_and_dtypes:
        sums, most = torch.ones(size, dtype=sums_dtype), torch.full((1,), dist.get_rank(), dtype=most_dtype)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls:
            exchange.all_reduce_sum_and_max(sums, most)
        right = bool((sums == exchange.size).all()) and most.item() == exchange.size - 1
        found.append((calls.call_count, right))
    return found


def test_large_pairs_and_mixed_ones_are_all_reduced_by_the_process_group():
    f32, f64 = torch.float32, torch.float64
    pairs = [(100, f64, f64), (2**17, f64, f64), (100, f64, f32)]
    results = run_ranks(through_sockets, 2, pairs, check_collectives=False)
    assert results == [[(0, True), (2, True), (2, True)]] * 2


def in_order(tensors):
    """Return the sum, rounded after each rank's, as every rank must round it."""
    first, *rest = tensors
    total = first.clone()
    for each in rest:
        total += each
    return total


def wait_for_nobody():
    ours = HostCollectives.open(dist.group.WORLD, 0.3)
    if dist.get_rank() == 0:
        ours.all_reduce(torch.ones(1))


def come_too_late():
    """Miss a meeting, then come to the next two: the first rank must not take old numbers for new ones."""
    ours, said = HostCollectives.open(dist.group.WORLD, 0.5), []
    sleep(1.0 * dist.get_rank())
    for _ in range(2):
        try:
            ours.all_reduce(torch.ones(1))
        except TimeoutError as problem:
            said.append(str(problem))
    return said


def test_a_recomputed_layer_may_use_another_buffer_than_before():
    """Views of the first are kept from an earlier call; those of the second are made in the recomputation."""
    ours = HostCollectives([torch.zeros(2, collectives.BUFFER, dtype=torch.uint8)], 0, mock.Mock())

    def layer(_, x):
        return ours.all_gather(x.detach())[0] * x

    x = torch.randn(3, requires_grad=True)
    ours.all_gather(x.detach())
    ours.all_gather(torch.zeros(5))
    recompute(layer, torch.nn.Module(), x, selective=True).sum().backward()
    assert torch.equal(x.grad, x)


def test_after_a_failed_meeting_there_are_no_more():
    first, _ = run_ranks(come_too_late, 2, check_collectives=False)
    assert first == ["rank 1 did not come to a meeting within 0.5 seconds"] * 2


def test_a_rank_that_never_comes_is_named():
    with pytest.raises(RankFailure, match=r"rank 1 did not come to a meeting within 0\.3 seconds"):
        run_ranks(wait_for_nobody, 2, check_collectives=False)


def test_a_rank_that_waits_is_seen_to_wait():
    """Or the watchdog would name it as one that holds the others up."""
    memory = mmap.mmap(-1, HostBarrier.size(2))
    alone = HostBarrier(memory, 0, 0, [0, 1], 1.0)
    assert alone.make()

    def wait():
        with suppress(TimeoutError):
            alone.wait()

    thread = Thread(target=wait)
    thread.start()
    sleep(0.3)
    frame = sys._current_frames()[thread.ident]
    thread.join()
    place = f'File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}'
    beat = Beat(rank=0, pid=1, count=1, step=1, phase="", slow=False, tick=1)
    assert Stuck(beat, False, f"Thread 0x1 (most recent call first):\n  {place}\n").waits


def meet_late_without_a_clock_to_sleep_by():
    """Meet a rank that comes later, as with a C library that has no ``sem_clockwait``."""
    ours = HostCollectives.open(dist.group.WORLD, 20.0)
    with mock.patch.object(barrier, "SLEEPS", new=False):
        sleep(0.2 * dist.get_rank())
        return ours.all_reduce(torch.ones(1)).item()


def test_c_libraries_without_a_monotonic_wait_serve_too():
    assert run_ranks(meet_late_without_a_clock_to_sleep_by, 2, check_collectives=False) == [2.0, 2.0]


def what_is_open():
    buffers = SharedBuffers.open(10, torch.float32, dist.group.WORLD)
    return HostCollectives.open(dist.group.WORLD, 1.0) is None, type(buffers.meeting)


def test_where_torch_checks_collectives_it_sees_them_all():
    assert run_ranks(what_is_open, 2, check_collectives=True) == [(True, GlooMeeting)] * 2
    assert run_ranks(what_is_open, 2, check_collectives=False) == [(False, HostBarrier)] * 2
