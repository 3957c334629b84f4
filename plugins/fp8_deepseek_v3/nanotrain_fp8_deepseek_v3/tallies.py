"""What rounding to eight bits does to the elements of operands: counted on a rank, summed over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
import torch

from nanotrain_core.api.torch import Metrics
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


def publish(tallies: Mapping[Key, Tally], metrics: Metrics) -> None:
    """Publish what was counted on this rank: the core adds it up over ranks, and nothing waits."""
    for key, tally in tallies.items():
        metrics.scalar(name_of("elements", key), tally.elements)
        metrics.scalar(name_of("amax", key), tally.amax)
        for counted, share in zip(COUNTED, tally.counts.double() / tally.elements, strict=True):
            metrics.scalar(name_of(counted, key), share, weight=tally.elements)


def name_of(figure: str, key: Key) -> str:
    """Return a metric's name, which has neither spaces nor signs: ``fp8/amax/layers.0.ffn.up/x-of-dW``."""
    return "/".join(["fp8", figure, *(word.replace(" ", "-").replace("+", "-") for word in key)])


def figures(values: Mapping[str, float], rows: Iterable[Key]) -> dict[Key, Figures]:
    """Return the figures of each of ``rows`` that a report's values have."""
    return {
        row: Figures(
            elements=int(values[name_of("elements", row)]),
            amax=values[name_of("amax", row)],
            **{counted: values[name_of(counted, row)] for counted in COUNTED},
        )
        for row in rows
        if name_of("elements", row) in values
    }
