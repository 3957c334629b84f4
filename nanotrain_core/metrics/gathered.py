"""What one rank has published under one name since the last logged step, as sums and a maximum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import attrs
import torch

from nanotrain_core.metrics.declared import OVER, Metric, Names, Statistic
from nanotrain_core.metrics.tensor_statistics import BROKEN, COUNT, SQUARES, derive

Number = float | torch.Tensor

#: Values of a name that accumulate on the device before they are summed.
MOST_WAITING = 64


@attrs.define(frozen=True)
class Spec:
    """The properties of a published name by which all ranks reduce it and read the result."""

    name: str
    owner: int
    """The monitor that publishes it, by its index in the run."""
    metric: Metric
    statistics: tuple[Statistic, ...] = ()
    """For statistics of a tensor: ``{statistic}`` in the name stands for each of these."""
    ranks: int = 0
    """For a per-rank value: the number of ranks. ``{over}`` in the name stands for each of
    :data:`OVER`."""
    names: Sequence[str] = attrs.field(init=False, eq=False, repr=False)
    """The names of the values that it is published as."""

    @names.default
    def _names(self) -> Sequence[str]:
        if self.ranks:
            return [self.name.replace("{over}", each) for each in OVER]
        return [self.name.replace("{statistic}", each) for each in self.statistics] or [self.name]

    width: int = attrs.field(init=False, eq=False, repr=False)
    """The number of sums it takes; each name also takes one maximum."""
    is_number: bool = attrs.field(init=False, eq=False, repr=False)
    """Whether it is one scalar of the run: no histogram, statistics of a tensor or per-rank value."""
    is_mean: bool = attrs.field(init=False, eq=False, repr=False)
    """Whether it is such a scalar, a mean over ranks."""
    counter: int | None = attrs.field(init=False, eq=False, repr=False)
    """Index of the sum that is 0 exactly if no rank published; None if no single sum shows this."""

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

    @is_mean.default
    def _is_mean(self) -> bool:
        return self.is_number and self.metric.reduce == "mean"

    @counter.default
    def _counter(self) -> int | None:
        return COUNT if self.statistics else 1 if self.is_number else None

    @property
    def broken(self) -> int:
        """The index of the sum that counts NaN maxima, since a maximum over ranks may lose them."""
        return BROKEN if self.statistics else 0

    def metric_of(self, name: str, declared: Sequence[Names]) -> Metric:
        """Return the declaration of one of its names."""
        found = declared[self.owner].find(name) if self.statistics or self.ranks else self.metric
        return found or attrs.evolve(self.metric, name=name)

    def read(self, sums: Sequence[float], most: float) -> Iterable[tuple[str, float]]:
        """Return names and values of the whole run, that ranks published. Not for a histogram."""
        if self.ranks:
            return zip(self.names, over_ranks(sums[: self.ranks], sums[self.ranks :]), strict=False)
        if self.statistics:
            found = (derive(each, sums, most) for each in self.statistics)
            return zip(self.names, found, strict=True)
        return [(self.name, self.scalar(sums[0], sums[1], most))]

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
                return math.nan if total else most  # the first sum counts NaN values


def over_ranks(sums: Sequence[float], counts: Sequence[float]) -> tuple[float, ...]:
    """Return the :data:`OVER` values of the means of the ranks that published; nothing if none did.

    A NaN mean counts as the largest of all.
    """
    pairs = enumerate(zip(sums, counts, strict=True))
    found = [(total / count, -rank) for rank, (total, count) in pairs if count]
    if not found:
        return ()
    mean = sum([value for value, _ in found]) / len(found)
    found.sort(key=lambda each: (math.isnan(each[0]), each))
    most, rank = found[-1]
    return most, mean, found[(len(found) - 1) // 2][0], float(-rank)


@attrs.define(eq=False)
class Unread:
    """Values of one name in tensors that have not been read."""

    sums: dict[int, list[torch.Tensor]] = attrs.field(factory=dict)
    """By the index of the first sum to add to."""
    most: list[torch.Tensor] = attrs.field(factory=list)
    norms: list[torch.Tensor] = attrs.field(factory=list)
    """Norms whose squares are summed."""
    ends: list[torch.Tensor] = attrs.field(factory=list)
    """Minimum and maximum elements, of which the largest magnitude counts."""


class Gathered:
    """Accumulates the sums and the maximum of one name. Device values stay there, without synchronization.

    A value in host memory is added immediately, which saves a few kernels for each value and step.
    """

    __slots__ = ("device", "most", "spec", "sums", "unread")

    def __init__(self, spec: Spec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self.sums = [0.0] * spec.width
        self.most = -math.inf
        self.unread: Unread | None = None
        """None as long as every value was in host memory, as most are."""

    def scalar(self, value: Number, weight: Number) -> None:
        """Add a number, or the current value of a tensor; ``weight`` is its weight in a mean."""
        reduce = self.spec.metric.reduce
        if type(value) is not float:
            value = self._copy(value)
        if reduce == "mean":
            if type(weight) is not float:
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
        if not isinstance(value, torch.Tensor):
            self.sums[place] += value
            return
        if value.is_cpu:
            for at, each in enumerate(value.reshape(-1).tolist(), place):
                self.sums[at] += each
            return
        waiting = self._unread().sums.setdefault(place, [])
        waiting.append(value.to(self.device, non_blocking=True))
        if len(waiting) > MOST_WAITING:
            waiting[:] = [torch.stack(waiting).sum(0)]

    def norms(self, found: Sequence[float] | Sequence[torch.Tensor]) -> None:
        """Add norms of parts of a tensor, numbers or scalar tensors that are not modified later."""
        for each in found:
            if isinstance(each, torch.Tensor):
                self._unread().norms.append(each.to(self.device, non_blocking=True))
            else:
                self.sums[SQUARES] += each * each
        if self.unread is None:
            return
        waiting = self.unread.norms
        if len(waiting) > MOST_WAITING:
            self.add(SQUARES, torch.stack([each.double() for each in waiting]).square().sum())
            waiting.clear()

    def ends(self, x: torch.Tensor) -> None:
        """Add the elements of a tensor. A norm of infinity takes 15 times as long on a CPU."""
        if x.is_cpu:  # there aminmax is slower than both
            self.top(abs(read(x.amin())))
            self.top(abs(read(x.amax())))
            return
        waiting = self._unread().ends
        waiting += [each.to(self.device, non_blocking=True) for each in torch.aminmax(x)]
        if len(waiting) > MOST_WAITING:
            self.top(torch.stack([each.double() for each in waiting]).abs().amax())
            waiting.clear()

    def top(self, value: Number) -> None:
        """Add a candidate for the maximum; a tensor is float64, and is not modified later."""
        if isinstance(value, torch.Tensor):
            waiting = self._unread().most
            waiting.append(value.to(self.device, non_blocking=True))
            if len(waiting) > MOST_WAITING:
                waiting[:] = [torch.stack(waiting).amax()]
        elif math.isnan(value):
            self.sums[self.spec.broken] += 1
        else:
            self.most = max(self.most, value)

    def _unread(self) -> Unread:
        if self.unread is None:
            self.unread = Unread()
        return self.unread

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
