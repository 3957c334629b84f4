"""What rounding to eight bits does to the elements of operands: counted on a rank, summed over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
import torch.distributed as dist

from nanotrain_core.api.torch import Mesh
from nanotrain_fp8_deepseek_v3.formats import Tiled

#: A module, or some of its parameters, and one of its operands.
Key = tuple[str, str]

COUNTED = ("underflow", "overflow", "at_largest")


@attrs.define(frozen=True)
class Figures:
    """What happened to one operand's elements; shares are of all of them."""

    elements: int
    amax: float
    """The largest magnitude; infinite or NaN if an element is."""
    underflow: float
    """Share that is not zero, and is once rounded."""
    overflow: float
    """Share that is no finite number once rounded: all of a tile in which an element is infinite or NaN.
    Nothing is ever clipped, since scales follow the largest element."""
    at_largest: float
    """Share whose code is the format's largest number, with either sign: about one element in a tile, fewer
    with power-of-two scales, all of a tile whose elements are of one size."""


@attrs.define(eq=False)
class Tally:
    """Counts over one operand. They stay on its device: nothing waits for them while a step lasts."""

    elements: int
    counts: torch.Tensor
    """[3] of :data:`COUNTED`, int64."""
    amax: torch.Tensor
    """[], float32."""

    @classmethod
    def on(cls, device: torch.device) -> Tally:
        """Return one that has counted nothing."""
        return cls(
            0, torch.zeros(len(COUNTED), dtype=torch.int64, device=device), torch.zeros((), device=device)
        )

    def add(self, x: torch.Tensor, tiled: Tiled) -> torch.Tensor:
        """Count ``x``, from which ``tiled`` was made, perhaps over another rounding; return its values."""
        largest, top = x.abs().max().float(), tiled.format.largest
        at_largest = tiled.codes().float().abs_() == top
        values = tiled.values()
        found = ((values == 0) & (x != 0)), ~values.isfinite(), at_largest
        self.elements += x.numel()
        self.counts += torch.stack([each.sum() for each in found])
        self.amax = torch.maximum(self.amax, largest)
        return values


def over_ranks(tallies: Mapping[Key, Tally], rows: Sequence[Key], mesh: Mesh) -> dict[Key, Figures]:
    """Return the figures of each of ``rows`` over all ranks, without those that nobody counted.

    Two all-reduces over the world. ``rows`` are the same on every rank.
    """
    sums = torch.zeros(len(rows), 1 + len(COUNTED), dtype=torch.int64, device=mesh.device)
    largest = torch.zeros(len(rows), device=mesh.device)
    for place, row in enumerate(rows):
        if tally := tallies.get(row):
            sums[place, 0], sums[place, 1:], largest[place] = tally.elements, tally.counts, tally.amax
    mesh.all_reduce(sums)
    mesh.all_reduce(largest.view(torch.int32), op=dist.ReduceOp.MAX)  # bits of magnitudes: NaN above all
    return {
        row: Figures(elements, amax, *(count / elements for count in counts))
        for row, (elements, *counts), amax in zip(rows, sums.tolist(), largest.tolist(), strict=True)
        if elements
    }
