"""Packs what one rank gathered under all names into one buffer, with few kernels whatever their number."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from nanotrain_core.metrics.gathered import Gathered, Spec
from nanotrain_core.metrics.tensor_statistics import SQUARES

Place = TypeVar("Place")


def pack(
    table: Sequence[Spec],
    gathered: Mapping[str, Gathered],
    device: torch.device,
    header: Sequence[float],
    ranks: Sequence[float],
) -> torch.Tensor:
    """Return ``header``, the sums and the maxima of all names of ``table``, and ``ranks``: float64, one
    buffer.

    A name that this rank did not publish adds nothing.
    """
    sums, most = [*header], [-math.inf] * len(table)
    values: list[tuple[range, torch.Tensor]] = []
    norms: list[tuple[range, torch.Tensor]] = []
    tops: list[tuple[tuple[int, int], torch.Tensor]] = []
    ends: list[tuple[tuple[int, int], torch.Tensor]] = []
    for number, spec in enumerate(table):
        mine, first = gathered.get(spec.name), len(sums)
        if mine is None:
            sums += [0.0] * spec.width
            continue
        sums += mine.sums
        most[number] = mine.most
        if not mine.waits:
            continue
        for place, vectors in mine.device_sums.items():
            values += [(range(first + place, first + place + x.numel()), x) for x in vectors]
        norms += [(range(first + SQUARES, first + SQUARES + 1), x) for x in mine.device_norms]
        at = (number, first + spec.broken)
        tops += [(at, x) for x in mine.device_most]
        ends += [(at, x) for x in mine.device_ends]
    # From an array: with a list, torch would check each number's type.
    host = torch.frombuffer(array("d", [*sums, *most, *ranks]), dtype=torch.float64)
    buffer = host.to(device, non_blocking=True)
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
        numbers = _index([len(sums) + number for number, _ in where], device)
        buffer.scatter_reduce_(0, numbers, x.masked_fill(broken, -math.inf), "amax")
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
