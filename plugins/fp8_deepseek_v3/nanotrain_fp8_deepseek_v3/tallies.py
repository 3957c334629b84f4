"""Counts the effect of rounding to eight bits on operands: on a rank, then summed over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
import torch

from nanotrain_core.api.torch import Metrics
from nanotrain_fp8_deepseek_v3.recipe import Rounded

#: A module, or some of its parameters, and one of its operands.
Key = tuple[str, str]

COUNTED = ("underflow", "overflow", "at_largest")


@attrs.define(frozen=True)
class Figures:
    """Statistics of one operand's elements; fractions are of all of them."""

    elements: int
    amax: float
    """The largest magnitude; infinite or NaN if an element is."""
    underflow: float
    """Fraction that is nonzero, and zero once rounded."""
    overflow: float
    """Fraction that is not finite once rounded: all of a tile with an infinite or NaN element.
    Nothing is ever clipped, since scales follow the largest element."""
    at_largest: float
    """Fraction whose code is the format's largest value, with either sign: about one element in a tile, fewer
    with power-of-two scales, all of a tile whose elements have equal magnitude."""


@attrs.define(eq=False)
class Tally:
    """Counts over one operand. They stay on its device: nothing waits for them during a step."""

    elements: int
    counts: torch.Tensor
    """[3] of :data:`COUNTED`, int64."""
    amax: torch.Tensor
    """[], float32."""

    @classmethod
    def on(cls, device: torch.device) -> Tally:
        """Return an empty tally."""
        return cls(
            0, torch.zeros(len(COUNTED), dtype=torch.int64, device=device), torch.zeros((), device=device)
        )

    def add(self, x: torch.Tensor, rounded: Rounded) -> None:
        """Count ``x``, from which ``rounded`` was made, perhaps over another rounding."""
        largest, at_largest = x.abs().max().float(), rounded.at_largest()
        values = rounded.values()
        found = ((values == 0) & (x != 0)), ~values.isfinite(), at_largest
        self.elements += x.numel()
        self.counts += torch.stack([each.sum() for each in found])
        self.amax = torch.maximum(self.amax, largest)


def publish(tallies: Mapping[Key, Tally], metrics: Metrics) -> None:
    """Publish this rank's counts: the core sums them over ranks, without a wait."""
    for key, tally in tallies.items():
        metrics.scalar(name_of("elements", key), tally.elements)
        metrics.scalar(name_of("amax", key), tally.amax)
        for counted, share in zip(COUNTED, tally.counts.double() / tally.elements, strict=True):
            metrics.scalar(name_of(counted, key), share, weight=tally.elements)


def name_of(figure: str, key: Key) -> str:
    """Return a metric's name, without spaces or signs: ``fp8/amax/layers.0.ffn.up/x-of-dW``."""
    return "/".join(["fp8", figure, *(word.replace(" ", "-").replace("+", "-") for word in key)])


def figures(values: Mapping[str, float], rows: Iterable[Key]) -> dict[Key, Figures]:
    """Return the figures of each of ``rows`` that are in a report's values."""
    return {
        row: Figures(
            elements=int(values[name_of("elements", row)]),
            amax=values[name_of("amax", row)],
            **{counted: values[name_of(counted, row)] for counted in COUNTED},
        )
        for row in rows
        if name_of("elements", row) in values
    }
