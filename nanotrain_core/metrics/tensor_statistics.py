"""Per-rank sums from which statistics of a whole tensor follow, for any blocks of it that ranks hold.

Squares are summed in float32 or wider, on a CPU in chunks of 65,536 elements, and the sums of chunks in
float64, as for the global gradient norm; everything else is summed in float64. Squares for a standard
deviation are summed in float64 throughout: if the mean is much larger than the deviation, as for a norm's
weight, only rounding errors would be left. Nothing here synchronizes with the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from nanotrain_core.metrics.declared import Statistic
from nanotrain_core.metrics.report import Histogram
from nanotrain_core.optim.grad_norm import chunks_for_norm

#: Elements counted at a time: finding their bins takes 0.5 GB, in float64 and int64.
COUNTED = 2**24

#: The sums over ranks for a tensor, in this order; the last counts magnitudes that are NaN.
SUM, SQUARES, NONFINITE, COUNT, BROKEN = range(5)


def norms_of(
    tensors: Sequence[torch.Tensor], least: torch.dtype = torch.float32
) -> list[list[float]] | list[list[torch.Tensor]]:
    """Return the 2-norms of each tensor's chunks, in ``least`` or wider: their squares are summed.

    All tensors are on one device, and none needs a gradient. Norms are numbers if that is the host, otherwise
    scalars on the device.
    """
    found: list[list[Any]] = [[] for _ in tensors]
    for dtype in {each.dtype for each in tensors}:  # one kernel per dtype
        of_dtype = [(n, each) for n, each in enumerate(tensors) if each.dtype == dtype]
        pieces = [(n, chunk) for n, each in of_dtype for chunk in chunks_for_norm([each])]
        wide = torch.promote_types(dtype, least)
        norms = torch._foreach_norm(
            [run for _, run in pieces], 2.0, **({} if wide == dtype else {"dtype": wide})
        )
        read = torch.stack(norms).tolist() if norms[0].is_cpu else norms
        for (n, _), norm in zip(pieces, read, strict=True):
            found[n].append(norm)
    return found


def derive(statistic: Statistic, sums: Sequence[float], most: float) -> float:
    """Return a statistic of a whole tensor from the sums and the largest magnitude over all ranks."""
    count = max(sums[COUNT], 1e-300)
    mean, square = sums[SUM] / count, sums[SQUARES] / count
    match statistic:
        case "norm":
            return math.sqrt(sums[SQUARES]) if sums[SQUARES] >= 0 else math.nan
        case "rms":
            return math.sqrt(square) if square >= 0 else math.nan
        case "mean":
            return mean
        case "std":
            return math.sqrt(max(0.0, square - mean * mean)) if math.isfinite(square) else math.nan
        case "max_abs":
            return math.nan if sums[BROKEN] else most
        case "nonfinite":
            return sums[NONFINITE]


@lru_cache(maxsize=64)
def _edges(edges: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(edges, dtype=torch.float64).to(device, non_blocking=True)


@torch.no_grad()
def count_into(
    values: torch.Tensor, edges: tuple[float, ...], *, log: bool, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return how many ``values`` are below the first edge, in each bin, above the last, and NaN [bins +
    3]; with ``weights`` of the same shape, the sums of their weights. Processes :data:`COUNTED` elements at a
    time."""
    counts = torch.zeros(len(edges) + 2, dtype=torch.float64, device=values.device)
    limits = _edges(edges, values.device)
    weighed = None if weights is None else torch.split(weights.detach().reshape(-1), COUNTED)
    for number, run in enumerate(torch.split(values.detach().reshape(-1), COUNTED)):
        flat = run.double().abs() if log else run.double()
        places = torch.bucketize(flat, limits, right=True).masked_fill_(flat.isnan(), len(edges) + 1)
        each = torch.ones_like(flat) if weighed is None else weighed[number].double()
        counts.scatter_add_(0, places, each)
    return counts


def histogram(edges: tuple[float, ...], sums: Sequence[float]) -> Histogram:
    """Return the histogram from the sums of :func:`count_into` over all ranks."""
    below, *counts, above, nan = sums
    return Histogram(edges, tuple(counts), below, above, nan)
