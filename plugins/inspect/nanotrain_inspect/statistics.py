"""Statistics of saved weights, a part of a tensor at a time: what is read fits beside a large model."""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs
import torch

from nanotrain_core.api.torch import WeightReader

#: Elements that are read at once, 256 MB in float64.
AT_ONCE = 32 * 1024 * 1024

#: Magnitudes above this many times the root mean square count as outliers; of a normal distribution 2e-9 do.
OUTLIER = 6.0


@attrs.define(frozen=True)
class Statistics:
    """Of one parameter, in float64."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    rms: float
    mean: float
    max_abs: float
    outliers: float
    """Share of elements beyond :data:`OUTLIER` times the root mean square."""
    nonfinite: int
    expert_squares: tuple[float, ...] = ()
    """Sum of squares of each expert [E], of weights [E, ., .] that hold those of all experts of a layer."""

    @property
    def peak(self) -> float:
        """Largest magnitude over root mean square: about 5 of a million normal numbers."""
        return self.max_abs / self.rms if self.rms else 0.0


def statistics_of(reader: WeightReader, name: str) -> Statistics:
    """Read a parameter twice, once to know its root mean square; elements that are not finite are counted
    alone."""
    shape = tuple(reader.shapes[name])
    count, total, squares, most, nonfinite, beyond = math.prod(shape), 0.0, 0.0, 0.0, 0, 0
    stacked, experts = ".experts." in name and len(shape) == 3, list[float]()
    for part in parts_of(reader, name):
        if stacked:
            experts += part.nan_to_num(0.0, 0.0, 0.0).square().sum((1, 2)).tolist()
        finite = part[torch.isfinite(part)]
        nonfinite += part.numel() - finite.numel()
        if finite.numel():
            total += finite.sum().item()
            squares += finite.square().sum().item()
            most = max(most, finite.abs().max().item())
    kept = max(1, count - nonfinite)
    rms = math.sqrt(squares / kept)
    if most > OUTLIER * rms:
        beyond = sum(int((part.abs() > OUTLIER * rms).sum()) for part in parts_of(reader, name))
    dtype = str(reader.dtypes[name]).removeprefix("torch.")
    numbers = (count, rms, total / kept, most, beyond / kept, nonfinite)
    return Statistics(name, shape, dtype, *numbers, tuple(experts))


@attrs.define(frozen=True)
class Difference:
    """Between two tensors of one name and shape."""

    name: str
    relative: float
    """2-norm of the difference over that of the first; infinite if that is 0 and the other is not."""
    max_abs: float
    cosine: float
    differing: float
    """Share of elements whose values differ; NaN differs from everything."""


def difference_of(first: WeightReader, second: WeightReader, name: str) -> Difference:
    """Compare a parameter, part by part."""
    squares = ones = others = dots = most = differing = 0.0
    for one, other in zip(parts_of(first, name), parts_of(second, name), strict=True):
        change = other - one
        squares += change.square().sum().item()
        ones += one.square().sum().item()
        others += other.square().sum().item()
        dots += (one * other).sum().item()
        differing += int((one != other).sum())
        if change.numel():
            most = max(most, change.abs().max().item())
    lengths = math.sqrt(ones * others)
    relative = math.sqrt(squares / ones) if ones else (math.inf if squares else 0.0)
    cosine = dots / lengths if lengths else float(not squares)
    return Difference(name, relative, most, cosine, differing / max(1, math.prod(first.shapes[name])))


def parts_of(reader: WeightReader, name: str) -> Iterator[torch.Tensor]:
    """Yield the rows of a parameter, as many as are read at once, in float64."""
    shape = tuple(reader.shapes[name])
    if not shape:
        yield reader.read(name, ()).double()
        return
    rest = tuple(slice(0, size) for size in shape[1:])
    rows = max(1, AT_ONCE // max(1, math.prod(shape[1:])))
    for first in range(0, shape[0], rows):
        yield reader.read(name, (slice(first, min(first + rows, shape[0])), *rest)).double()
