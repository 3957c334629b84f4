"""What one rank has published under one name since the last logged step, as sums and a maximum."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import attrs
import torch

from nanotrain_core.metrics.declared import Metric, Names
from nanotrain_core.metrics.measure import BROKEN, COUNT, Statistic, derive, histogram
from nanotrain_core.metrics.report import Histogram

Number = float | torch.Tensor

#: Values of a name that wait on the device before they are added up.
MOST_WAITING = 64


@attrs.define(frozen=True)
class Spec:
    """What all ranks must know of a name to reduce it and to read the result."""

    name: str
    owner: int
    """The monitor that publishes it, by its place in the run."""
    metric: Metric
    statistics: tuple[Statistic, ...] = ()
    """Of a tensor's: ``{statistic}`` in the name stands for each of these."""

    @property
    def width(self) -> int:
        """How many sums it takes; each name also takes one maximum."""
        if self.metric.bins is not None:
            return self.metric.bins.count + 3
        return 5 if self.statistics else 2

    @property
    def broken(self) -> int:
        """Which of its sums counts maxima that are NaN, since a maximum over ranks may lose them."""
        return BROKEN if self.statistics else 0

    @property
    def names(self) -> Sequence[str]:
        """What its values are called."""
        return [self.name.replace("{statistic}", each) for each in self.statistics] or [self.name]

    def metric_of(self, name: str, declared: Sequence[Names]) -> Metric:
        """Return the declaration of one of its names."""
        found = declared[self.owner].find(name) if self.statistics else self.metric
        return found or attrs.evolve(self.metric, name=name)

    def read(self, sums: Sequence[float], most: float) -> Iterator[tuple[str, float | Histogram]]:
        """Yield names and values of the whole run; none if no rank published."""
        if self.metric.bins is not None:
            if any(sums):
                yield self.name, histogram(self.metric.bins.edges, sums)
        elif self.statistics:
            if sums[COUNT]:
                for name, each in zip(self.names, self.statistics, strict=True):
                    yield name, derive(each, sums, most)
        elif sums[1]:
            yield self.name, self._scalar(sums[0], sums[1], most)

    def _scalar(self, total: float, count: float, most: float) -> float:
        match self.metric.reduce:
            case "sum":
                return total
            case "mean":
                return total / count
            case "min":
                return math.nan if total else -most
            case _:
                return math.nan if total else most  # there the sum counts what is NaN


class Gathered:
    """Sums and a maximum of one name; numbers of the device stay there, and nothing waits for it."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.sums = [0.0] * spec.width
        self.most = -math.inf
        self.device_sums: dict[int, list[torch.Tensor]] = {}
        """By the place of the first."""
        self.device_most: list[torch.Tensor] = []

    def scalar(self, value: Number, weight: Number) -> None:
        """Take one value; ``weight`` is that of a mean."""
        reduce = self.spec.metric.reduce
        if reduce in ("sum", "mean"):
            self.add(0, value * weight if reduce == "mean" else value)
            self.add(1, weight if reduce == "mean" else 1.0)
            return
        if reduce == "last":
            self.__init__(self.spec)  # type: ignore[misc]
        self.add(1, 1.0)
        self.top(-value if reduce == "min" else value)

    def add(self, place: int, value: Number) -> None:
        """Add a number, or a vector from ``place`` on."""
        if not isinstance(value, torch.Tensor):
            self.sums[place] += value
            return
        waiting = self.device_sums.setdefault(place, [])
        waiting.append(value.detach())
        if len(waiting) > MOST_WAITING:
            waiting[:] = [torch.stack([each.double() for each in waiting]).sum(0)]

    def top(self, value: Number) -> None:
        """Take what may be the largest."""
        if isinstance(value, torch.Tensor):
            self.device_most.append(value.detach())
            if len(self.device_most) > MOST_WAITING:
                self.device_most[:] = [torch.stack([each.double() for each in self.device_most]).amax()]
        elif math.isnan(value):
            self.sums[self.spec.broken] += 1
        else:
            self.most = max(self.most, value)
