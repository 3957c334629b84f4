"""What one rank has published under one name since the last logged step, as sums and a maximum."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import attrs
import torch

from nanotrain_core.metrics.declared import OVER, Metric, Names, Statistic
from nanotrain_core.metrics.report import Histogram
from nanotrain_core.metrics.tensor_statistics import BROKEN, COUNT, SQUARES, derive, histogram

Number = float | torch.Tensor

#: Values of a name that accumulate on the device before they are summed.
MOST_WAITING = 64


@attrs.define(frozen=True)
class Spec:
    """What all ranks must know of a name to reduce it and to read the result."""

    name: str
    owner: int
    """The monitor that publishes it, by its index in the run."""
    metric: Metric
    statistics: tuple[Statistic, ...] = ()
    """For a tensor's: ``{statistic}`` in the name stands for each of these."""
    ranks: int = 0
    """For a per-rank value: the number of ranks. ``{over}`` in the name stands for each of
    :data:`OVER`."""
    names: Sequence[str] = attrs.field(init=False, eq=False, repr=False)
    """Names of its values."""

    @names.default
    def _names(self) -> Sequence[str]:
        if self.ranks:
            return [self.name.replace("{over}", each) for each in OVER]
        return [self.name.replace("{statistic}", each) for each in self.statistics] or [self.name]

    width: int = attrs.field(init=False, eq=False, repr=False)
    """The number of sums it takes; each name also takes one maximum."""
    is_number: bool = attrs.field(init=False, eq=False, repr=False)
    """Whether it is one scalar of the run: no histogram, and neither a tensor's nor a per-rank value."""

    @width.default
    def _width(self) -> int:
        if self.metric.bins is not None:
            return self.metric.bins.count + 3
        if self.ranks:
            return 2 * self.ranks  # for each rank a sum and a count
        return 5 if self.statistics else 2

    @is_number.default
    def _is_number(self) -> bool:
        return self.metric.kind == "scalar" and not self.statistics and not self.ranks

    @property
    def broken(self) -> int:
        """The index of the sum that counts NaN maxima, since a maximum over ranks may lose them."""
        return BROKEN if self.statistics else 0

    def metric_of(self, name: str, declared: Sequence[Names]) -> Metric:
        """Return the declaration of one of its names."""
        found = declared[self.owner].find(name) if self.statistics or self.ranks else self.metric
        return found or attrs.evolve(self.metric, name=name)

    def read(self, sums: Sequence[float], most: float) -> Iterator[tuple[str, float | Histogram]]:
        """Yield names and values of the whole run; none if no rank published."""
        if self.metric.bins is not None:
            if any(sums):
                yield self.name, histogram(self.metric.bins.edges, sums)
        elif self.ranks:
            yield from zip(self.names, over_ranks(sums[: self.ranks], sums[self.ranks :]), strict=False)
        elif self.statistics:
            if sums[COUNT]:
                for name, each in zip(self.names, self.statistics, strict=True):
                    yield name, derive(each, sums, most)
        elif sums[1]:
            yield self.name, self.scalar(sums[0], sums[1], most)

    def scalar(self, total: float, count: float, most: float) -> float:
        """Return the scalar of the whole run, from its two sums and its maximum."""
        match self.metric.reduce:
            case "sum":
                return total
            case "mean":
                return total / count
            case "min":
                return math.nan if total else -most
            case _:
                return math.nan if total else most  # there the sum counts NaN


def over_ranks(sums: Sequence[float], counts: Sequence[float]) -> tuple[float, ...]:
    """Return the :data:`OVER` values of the means of the ranks that published; nothing if none did.

    A NaN mean counts as the largest of all.
    """
    values = {
        rank: total / count for rank, (total, count) in enumerate(zip(sums, counts, strict=True)) if count
    }
    if not values:
        return ()
    ascending = sorted(values, key=lambda rank: (math.isnan(values[rank]), values[rank], -rank))
    middle, most = ascending[(len(values) - 1) // 2], ascending[-1]
    return values[most], sum(values.values()) / len(values), values[middle], float(most)


class Gathered:
    """Sums and a maximum of one name; device values stay there, without synchronization.

    A value in host memory is read immediately: this saves a few kernels for each in the step.
    """

    def __init__(self, spec: Spec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self.sums = [0.0] * spec.width
        self.most = -math.inf
        self.device_sums: dict[int, list[torch.Tensor]] = {}
        """By the index of the first."""
        self.device_most: list[torch.Tensor] = []
        self.device_norms: list[torch.Tensor] = []
        """Norms whose squares are summed."""
        self.device_ends: list[torch.Tensor] = []
        """Minimum and maximum elements, of which the largest magnitude counts."""

    @property
    def waits(self) -> bool:
        """Whether there are values in tensors that have not been read."""
        return bool(self.device_sums or self.device_norms or self.device_most or self.device_ends)

    def scalar(self, value: Number, weight: Number) -> None:
        """Add one value in its current state; ``weight`` is its weight in a mean."""
        reduce, value = self.spec.metric.reduce, self._copy(value)
        if reduce == "mean":
            weight = self._copy(weight)
            self.add(0, _product(value, weight))
            self.add(1, weight)
            return
        if reduce == "sum":
            self.add(0, value)
            self.add(1, 1.0)
            return
        if reduce == "last" and self.sums[1]:  # there is an earlier one
            self.__init__(self.spec, self.device)  # type: ignore[misc]
        self.add(1, 1.0)
        self.top(-value if reduce == "min" else value)

    def add(self, place: int, value: Number) -> None:
        """Add a scalar, or a float64 vector that is not modified later, from ``place`` on."""
        if isinstance(value, torch.Tensor) and value.is_cpu and value.numel() == 1:
            value = read(value)
        if not isinstance(value, torch.Tensor):
            self.sums[place] += value
            return
        waiting = self.device_sums.setdefault(place, [])
        waiting.append(value.to(self.device, non_blocking=True))
        if len(waiting) > MOST_WAITING:
            waiting[:] = [torch.stack(waiting).sum(0)]

    def norms(self, found: Sequence[torch.Tensor]) -> None:
        """Add norms of parts of a tensor, scalars that are not modified later."""
        if found and found[0].is_cpu:
            self.sums[SQUARES] += sum(read(each) ** 2 for each in found)
            return
        self.device_norms += [each.to(self.device, non_blocking=True) for each in found]
        if len(self.device_norms) > MOST_WAITING:
            wide = torch.stack([each.double() for each in self.device_norms])
            self.add(SQUARES, wide.square().sum())
            self.device_norms.clear()

    def ends(self, least: torch.Tensor, largest: torch.Tensor) -> None:
        """Add the minimum and the maximum element of a tensor, scalars that are not modified later."""
        if least.is_cpu:
            self.top(abs(read(least)))
            self.top(abs(read(largest)))
            return
        self.device_ends += [each.to(self.device, non_blocking=True) for each in (least, largest)]
        if len(self.device_ends) > MOST_WAITING:
            self.top(torch.stack([each.double() for each in self.device_ends]).abs().amax())
            self.device_ends.clear()

    def top(self, value: Number) -> None:
        """Add a candidate for the maximum; a tensor is float64, and is not modified later."""
        if isinstance(value, torch.Tensor):
            self.device_most.append(value.to(self.device, non_blocking=True))
            if len(self.device_most) > MOST_WAITING:
                self.device_most[:] = [torch.stack(self.device_most).amax()]
        elif math.isnan(value):
            self.sums[self.spec.broken] += 1
        else:
            self.most = max(self.most, value)

    def _copy(self, value: Number) -> Number:
        """Return a tensor's value as a float64 copy: the caller may modify or free the tensor."""
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_cpu:
            return read(value)
        own = value.detach().reshape(()).to(torch.float64, copy=True)
        return own.to(self.device, non_blocking=True)


def read(value: torch.Tensor) -> float:
    """Return the value of a tensor in host memory, without a synchronization."""
    assert value.is_cpu
    return float(value.item())


def _product(value: Number, weight: Number) -> Number:
    """Return ``value * weight``, and 0 where the weight is 0, whatever the value."""
    if isinstance(weight, torch.Tensor):
        return (weight * value).masked_fill(weight == 0, 0.0)
    return value * weight if weight else 0.0
