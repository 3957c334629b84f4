"""What a transport offers the ranks of a group, against sums and gathers made in one process."""

import pytest
import torch
import torch.distributed as dist

from nanotrain_core.layout.exchange import Exchange
from nanotrain_core.layout.staging import StagedTransport
from nanotrain_core.layout.transport import Transport
from nanotrain_core.models.kernels import installed_kernels
from nanotrain_core.testing.collectives import CollectiveLog
from nanotrain_core.testing.pool import run_ranks

CPU = torch.device("cpu")
BUCKETS, LENGTH = 5, 24


class Native(Transport):
    """The calls that are made of NCCL, of gloo."""

    def exchange(self, group, device, timeout):
        return Exchange(group, device)


#: The last goes through shared memory where nanotrain-cpu is installed.
TRANSPORTS = {
    "gloo": Transport,
    "native": Native,
    "staged": StagedTransport,
    "installed": lambda: installed_kernels(CPU).transport(),
}


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exchange_of(transport):
    return TRANSPORTS[transport]().exchange(dist.group.WORLD, CPU, 60.0)


def plain_tensors(transport):
    """Return what each collective of plain tensors gives, awaited and begun, and an operand afterwards."""
    exchange, found = exchange_of(transport), []
    x, shares = numbers(exchange.rank, 3, 4), numbers(exchange.rank, exchange.size, 2, 5)
    for async_op in (False, True):
        for begun in (
            exchange.all_reduce(x.mT, async_op=async_op),
            exchange.all_gather(x.mT, async_op=async_op),
            exchange.reduce_scatter(shares, async_op=async_op),
        ):
            found.append(begun())
    return found, x


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_collectives_of_plain_tensors_are_exact_and_leave_operands_alone(transport, ranks):
    xs = [numbers(rank, 3, 4) for rank in range(ranks)]
    shares = torch.stack([numbers(rank, ranks, 2, 5) for rank in range(ranks)])
    results = run_ranks(plain_tensors, ranks, transport, check_collectives=False)
    for rank, (found, x) in enumerate(results):
        assert torch.equal(torch.as_tensor(x), xs[rank])
        expected = [sum(xs).mT, torch.stack(xs).mT, shares[:, rank].sum(0)] * 2
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.as_tensor(got), want, rtol=0, atol=1e-14)


def rows_between(transport):
    """Return what an all-to-all of uneven rows gives, and of equal ones, awaited and begun."""
    exchange = exchange_of(transport)
    rank, size = exchange.rank, exchange.size
    sent = [rank + to for to in range(size)]  # rank r sends r + q rows to rank q, and gets as many from it
    x, found = numbers(rank, sum(sent), 4), []
    for async_op in (False, True):
        coming = x.new_empty(sum(sent), 4)
        found.append(exchange.all_to_all(coming, x, sent, sent, async_op=async_op)())
        even = numbers(rank, size, 3)
        found.append(exchange.all_to_all(torch.empty_like(even), even, async_op=async_op)())
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rows_reach_the_rank_they_are_sent_to(transport):
    ranks = 2
    xs = [numbers(rank, sum(rank + to for to in range(ranks)), 4) for rank in range(ranks)]
    evens = [numbers(rank, ranks, 3) for rank in range(ranks)]
    for rank, found in enumerate(run_ranks(rows_between, ranks, transport, check_collectives=False)):
        pieces = [x.split([source + to for to in range(ranks)])[rank] for source, x in enumerate(xs)]
        expected = [torch.cat(pieces), torch.stack([even[rank] for even in evens])] * 2
        for got, want in zip(found, expected, strict=True):
            assert torch.equal(torch.as_tensor(got), want)


def around(transport):
    """Return what two messages to the next rank bring, both begun before the first is awaited."""
    exchange = exchange_of(transport)
    rank, before = exchange.rank, (exchange.rank - 1) % exchange.size
    begun = [
        exchange.shift(torch.empty(before + more, 4, dtype=torch.float64), numbers(rank, rank + more, 4))
        for more in (1, 2)
    ]
    return [pending() for pending in begun]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_messages_go_to_the_next_rank_in_order(transport, ranks):
    for rank, found in enumerate(run_ranks(around, ranks, transport, check_collectives=False)):
        before = (rank - 1) % ranks
        for more, got in zip((1, 2), found, strict=True):
            assert torch.equal(torch.as_tensor(got), numbers(before, before + more, 4))


def buffers_twice(transport):
    """Return sums of two buffers, filled twice, begun together and awaited in one order."""
    exchange, found = exchange_of(transport), []
    buffers = [exchange.buffer(length, torch.float64) for length in (1, 10)]
    for turn in range(2):
        for number, buffer in enumerate(buffers):
            buffer.flat.copy_(numbers(100 * turn + 10 * number + exchange.rank, len(buffer.flat)))
        for pending in [buffer.all_reduce() for buffer in buffers]:
            found.append(pending().clone())
        assert all(torch.equal(a, b.flat) for a, b in zip(found[-2:], buffers, strict=True))
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_buffer_is_summed_in_place_again_and_again(transport):
    for found in run_ranks(buffers_twice, 2, transport):
        for place, got in enumerate(found):
            turn, number = divmod(place, 2)
            each = [numbers(100 * turn + 10 * number + rank, (1, 10)[number]) for rank in range(2)]
            torch.testing.assert_close(torch.as_tensor(got), sum(each), rtol=0, atol=1e-14)


def many_buckets(transport, *, broken_off):
    """Return this rank's ranges of sums, each added to once more, and whole buckets that were gathered."""
    exchange = exchange_of(transport)
    buckets = exchange.buckets(1000, least=8 * LENGTH)
    own = LENGTH // exchange.size
    into = torch.full((BUCKETS, own), torch.nan, dtype=torch.float64)
    if broken_off:
        buckets.reduce_scatter(LENGTH, lambda flat: flat.fill_(7.0), torch.zeros_like(into[0]), add=False)
        buckets.forget()
    for add in (False, True):
        for number, range_ in enumerate(into):
            mine = numbers(100 * add + 10 * number + exchange.rank, LENGTH)
            buckets.reduce_scatter(LENGTH, lambda flat, mine=mine: flat.copy_(mine), range_, add=add)
    buckets.drain()
    wholes = torch.full((BUCKETS, LENGTH), torch.nan, dtype=torch.float64)
    wholes.unflatten(1, (exchange.size, own))[:, exchange.rank] = into
    waits = [buckets.all_gather(whole) for whole in wholes]
    buckets.drain()
    for pending in filter(None, waits):
        pending()
    return into, wholes, buckets.limit


@pytest.mark.parametrize("broken_off", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_buckets_are_summed_into_ranges_and_gathered_from_them(transport, ranks, broken_off):
    each = torch.stack(
        [
            torch.stack(
                [sum(numbers(100 * add + 10 * n + r, LENGTH) for add in (0, 1)) for n in range(BUCKETS)]
            )
            for r in range(ranks)
        ]
    )
    results = run_ranks(many_buckets, ranks, transport, broken_off=broken_off, check_collectives=False)
    for rank, (into, wholes, limit) in enumerate(results):
        assert limit <= 1000
        torch.testing.assert_close(torch.as_tensor(wholes), each.sum(0), rtol=0, atol=1e-13)
        assert torch.equal(torch.as_tensor(wholes).chunk(ranks, 1)[rank], torch.as_tensor(into))


def calls(transport):
    """Return the process group's collectives that an all-gather and a reduce-scatter are made of."""
    exchange = exchange_of(transport)
    exchange.all_gather(torch.ones(2))()  # what a transport has to set up is done
    with CollectiveLog() as log:
        exchange.all_gather(torch.ones(2))()
        exchange.reduce_scatter(torch.ones(2, 2))()
    return [name.partition(".")[0].strip("_") for name, *_ in log.entries]


def test_each_backend_has_the_calls_that_it_does_best():
    """gloo's own all-gather and reduce-scatter take several times as long; NCCL's take one call each."""
    native, gloo = (run_ranks(calls, 2, transport)[0] for transport in ("native", "gloo"))
    assert [len(native), native[0][:9], native[1][:14]] == [2, "allgather", "reduce_scatter"]
    assert gloo == ["broadcast", "broadcast", "alltoall_base"]
