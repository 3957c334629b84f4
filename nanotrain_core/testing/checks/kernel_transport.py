"""Kernels' transport gives what process groups give, on two and on four ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from nanotrain_core.layout.exchange import Exchange
from nanotrain_core.layout.transport import Transport
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check
from nanotrain_core.testing.checks.kernels import CPU, kernels_of
from nanotrain_core.testing.pool import run_ranks

#: Elements of what ranks exchange: one, an odd number, more than a page has.
SIZES = (1, 37, 4099)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
SECONDS = 60.0

Exchanged = list[tuple[str, torch.Tensor]]


@check("kernels", since="0.3", variants=("2", "4"))
def exchanges_are_those_of_process_groups(case: Case, ranks: str) -> None:
    """On so many ranks ``transport()`` sums, gathers, scatters and exchanges what process groups do.

    Of three dtypes, of any number of elements and rows, one call after the other.
    """
    for rank, (found, expected) in enumerate(run_ranks(exchanged, int(ranks), case)):
        for (what, got), (_, want) in zip(found, expected, strict=True):
            assert (got.dtype, got.shape) == (want.dtype, want.shape), (
                f"rank {rank}, {what}: {tuple(got.shape)} of {got.dtype}, expected {tuple(want.shape)} of "
                f"{want.dtype}"
            )
            # Sums may be in another order.
            away = float((got.double() - want.double()).abs().max()) if got.numel() else 0.0
            bound = 4 * torch.finfo(want.dtype).eps * (1 + float(want.abs().max()) if want.numel() else 1.0)
            assert away <= bound, f"rank {rank}, {what}: {away:.3g} away from a process group's"


def exchanged(case: Case) -> tuple[Exchanged, Exchanged]:
    """Return what this rank gets through the kernels' transport, and through process groups."""
    group = dist.group.WORLD
    assert group is not None
    transports = kernels_of(case).transport(), Transport()
    one, other = (list(_results(each.exchange(group, CPU, SECONDS))) for each in transports)
    return one, other


def _results(exchange: Exchange) -> Iterator[tuple[str, torch.Tensor]]:
    ranks, rank = exchange.size, exchange.rank
    draw = torch.Generator().manual_seed(rank)
    for dtype in DTYPES:
        for size in SIZES:
            x = torch.randn(size, generator=draw).to(dtype)
            shares = torch.randn(ranks, size, generator=draw).to(dtype)
            what = f"of {size} elements in {dtype}"
            yield f"all_reduce {what}", exchange.all_reduce(x)().clone()
            sums, most = x.clone(), shares[0].clone()
            exchange.all_reduce_sum_and_max(sums, most)
            yield from ((f"sums {what}", sums), (f"maxima {what}", most))
            yield f"all_gather {what}", exchange.all_gather(x)().clone()
            yield f"reduce_scatter {what}", exchange.reduce_scatter(shares)().clone()
            buffer = exchange.buffer(size, dtype)
            for time in (1, 2):  # its memory is used again
                buffer.flat.copy_(time * x)
                yield f"buffer {what}, time {time}", buffer.all_reduce()().clone()
            # Each rank sends another number of rows to each: none to some.
            sent = [(rank + to) % 3 for to in range(ranks)]
            received = [(source + rank) % 3 for source in range(ranks)]
            rows = torch.randn(sum(sent), size, generator=draw).to(dtype)
            made = exchange.all_to_all(rows.new_empty(sum(received), size), rows, received, sent)
            yield f"all_to_all {what}", made().clone()
