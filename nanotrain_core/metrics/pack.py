"""Packs what one rank gathered under all names into one buffer, with few kernels for any number of names."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from nanotrain_core.metrics.gathered import Gathered
from nanotrain_core.metrics.table import Table
from nanotrain_core.metrics.tensor_statistics import SQUARES

Place = TypeVar("Place")


def pack(
    table: Table,
    gathered: Mapping[str, Gathered],
    device: torch.device,
    header: Sequence[float],
    ranks: Sequence[float],
) -> torch.Tensor:
    """Return ``header``, the sums and the maxima of all names of ``table``, and ``ranks``: float64, one
    buffer.

    A name that this rank did not publish adds nothing. Sums of the table are taken.
    """
    # An array: with a list, torch would check each number's type.
    numbers = array("d", [*header])
    numbers.extend(table.take())
    numbers.extend(array("d", ranks))
    before = len(header)
    after = before + table.width  # where maxima begin
    values: list[tuple[range, torch.Tensor]] = []
    norms: list[tuple[range, torch.Tensor]] = []
    tops: list[tuple[tuple[int, int], torch.Tensor]] = []
    ends: list[tuple[tuple[int, int], torch.Tensor]] = []
    for name, mine in gathered.items():
        number, first, spec = table.places[name]
        first += before
        if spec.is_number or spec.ranks:
            for position, each in enumerate(mine.sums, first):
                numbers[position] += each
        else:
            numbers[first : first + len(mine.sums)] = array("d", mine.sums)
        numbers[after + number] = mine.most
        if (unread := mine.unread) is None:
            continue
        for place, vectors in unread.sums.items():
            values += [(range(first + place, first + place + x.numel()), x) for x in vectors]
        norms += [(range(first + SQUARES, first + SQUARES + 1), x) for x in unread.norms]
        at = (number, first + spec.broken)
        tops += [(at, x) for x in unread.most]
        ends += [(at, x) for x in unread.ends]
    buffer = torch.frombuffer(numbers, dtype=torch.float64).to(device, non_blocking=True)
    if not (values or norms or tops or ends):  # as in most steps on a CPU
        return buffer
    squares = [(where, x.square()) for where, x in _wide(norms)]
    highest = [*_wide(tops), *((where, x.abs()) for where, x in _wide(ends))]
    places = [place for places, _ in values for place in places]
    added = [x.reshape(-1) for _, x in values]
    for spans, x in squares:
        places += [place for span in spans for place in span]
        added.append(x)
    for where, x in highest:
        broken = x.isnan()
        places += [place for _, place in where]
        added.append(broken.double())
        tops_of = _index([after + number for number, _ in where], device)
        buffer.scatter_reduce_(0, tops_of, x.masked_fill(broken, -math.inf), "amax")
    if added:
        buffer.index_add_(0, _index(places, device), torch.cat(added))
    return buffer


def _wide(
    found: Iterable[tuple[Place, torch.Tensor]],
) -> Iterator[tuple[list[Place], torch.Tensor]]:
    """Yield scalars in float64, those of one dtype in one tensor, with the index of each."""
    pairs = list(found)
    for dtype in {x.dtype for _, x in pairs}:
        alike = [(place, x) for place, x in pairs if x.dtype == dtype]
        yield [place for place, _ in alike], torch.stack([x.reshape(()) for _, x in alike]).double()


def _index(places: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(places, dtype=torch.int64).to(device, non_blocking=True)
