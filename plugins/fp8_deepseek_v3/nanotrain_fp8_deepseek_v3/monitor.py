"""Watches what eight bits do to the operands of each module: sizes, what is lost to zero, what is at the top.

On a watched step the operands of rank 0's modules are rounded once more, to be counted; other steps cost
nothing. Numbers of the run are never touched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isnan
from typing import Any

import attrs
import torch

from nanotrain_core.contracts import Monitor, RunInfo, StepReport
from nanotrain_core.files import write_text_atomically
from nanotrain_core.products import Kept, LinearProducts, give_products, products_of
from nanotrain_fp8_deepseek_v3 import FP8MonitorConfig
from nanotrain_fp8_deepseek_v3.formats import E4M3, Format, quantise
from nanotrain_fp8_deepseek_v3.products import Recipe

#: In the run folder: a line for each watched step.
FILE = "fp8.jsonl"


@attrs.define
class Tally:
    """Counts over the elements of one operand of one module."""

    amax: float = 0.0
    elements: int = 0
    lost: int = 0
    """Elements that are not zero, and are once rounded."""
    top: int = 0
    """Elements at the format's largest number: about one in a tile."""

    def add(self, x: torch.Tensor, recipe: Recipe, format_: Format, *, power_of_two: bool) -> None:
        """Count ``x``. Infinite and NaN elements make ``amax`` so, and are not counted otherwise."""
        if not x.numel():
            return
        tile = (1, recipe.tile) if recipe.tile else (0, 0)
        codes = quantise(x, tile, format_, power_of_two=power_of_two).codes().float()
        self.amax = max(self.amax, x.abs().max().item(), key=lambda size: (isnan(size), size))
        self.elements += x.numel()
        self.lost += int(((codes == 0) & (x != 0)).sum())
        self.top += int((codes.abs() == format_.largest).sum())

    def numbers(self) -> dict[str, float]:
        """Return amax and the shares of elements."""
        count = max(1, self.elements)
        return {"amax": self.amax, "underflow": self.lost / count, "at_largest": self.top / count}


class Watched:
    """Products whose operands are counted. See :class:`~nanotrain_core.products.LinearProducts`."""

    def __init__(self, behind: LinearProducts, recipe: Recipe, watch: Watch, name: str) -> None:
        self.behind, self.recipe, self.watch, self.name = behind, recipe, watch, name

    def grouped(self, counts_E: torch.Tensor) -> Watched:
        """Return the same for stacked weights."""
        return Watched(self.behind.grouped(counts_E), self.recipe, self.watch, self.name)

    def forward(self, x_MK: torch.Tensor, *weights: torch.Tensor) -> tuple[list[torch.Tensor], Kept]:
        """Count x."""
        if self.watch.on:
            tally = self.watch.of(self.name, "input")
            tally.add(x_MK, self.recipe, E4M3, power_of_two=self.recipe.input_power_of_two)
        return self.behind.forward(x_MK, *weights)

    def keep(self, x_MK: torch.Tensor) -> Kept:
        """Pass it on: x was counted in forward."""
        return self.behind.keep(x_MK)

    def input_gradient(self, d_y_MN: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Count dy."""
        if self.watch.on:
            tally, recipe = self.watch.of(self.name, "gradient"), self.recipe
            tally.add(d_y_MN, recipe, recipe.gradients, power_of_two=recipe.gradient_power_of_two)
        return self.behind.input_gradient(d_y_MN, weight)

    def weight_gradient(self, d_y_MN: torch.Tensor, kept: Kept) -> torch.Tensor:
        """Pass it on."""
        return self.behind.weight_gradient(d_y_MN, kept)

    def __getattr__(self, name: str) -> Any:
        """Pass on what is optional."""
        if name in ("narrow", "widen"):
            return getattr(self.behind, name)
        raise AttributeError(name)


class Watch:
    """All tallies of a watched step."""

    def __init__(self) -> None:
        self.on = False
        self.tallies: dict[tuple[str, str], Tally] = {}

    def of(self, module: str, operand: str) -> Tally:
        """Return the tally of one operand."""
        return self.tallies.setdefault((module, operand), Tally())


class FP8Monitor(Monitor):
    """The ``fp8`` monitor."""

    every_step = True
    reads_weights = False

    def __init__(self, config: FP8MonitorConfig) -> None:
        self.config, self.watch = config, Watch()
        self.lines: list[str] = []

    def on_start(self, run: RunInfo) -> None:
        """Put counters before rank 0's products."""
        self.run, self.watching = run, run.rank == 0
        before = run.folder / FILE if run.folder is not None else None
        self.lines = before.read_text().splitlines() if before is not None and before.is_file() else []
        for part in run.parts if self.watching else ():
            for name, module in part.named_modules():
                given = products_of(module)
                if given and all(hasattr(products, "recipe") for products in given.values()):
                    give_products(module, self._watched(name, given))
        self.watch.on = self.watching and run.first_step % self.config.every == 0

    def _watched(self, name: str, given: Mapping[str, LinearProducts]) -> dict[str, LinearProducts]:
        """Return counted products; what was shared between parameters stays so."""
        own = {
            products: Watched(products, products.recipe, self.watch, _label(name, key, given))  # type: ignore[attr-defined]
            for key, products in given.items()
        }
        return {key: own[products] for key, products in given.items()}

    def on_step(self, report: StepReport) -> None:
        """Report a watched step, and decide whether to watch the next."""
        if not self.watching:
            return
        if self.watch.on and self.watch.tallies:
            self._tell(report.step)
        self.watch.tallies.clear()
        self.watch.on = report.step % self.config.every == 0

    def _tell(self, step: int) -> None:
        found = {f"{name} {operand}": t.numbers() for (name, operand), t in self.watch.tallies.items()}
        worst = max(found, key=lambda key: found[key]["underflow"])
        largest = max(found, key=lambda key: found[key]["amax"])
        print(
            f"step={step} fp8 of rank 0: most underflow {found[worst]['underflow']:.2%} in {worst}; "
            f"largest {found[largest]['amax']:.3g} in {largest}",
            flush=True,
        )
        self.lines.append(json.dumps({"step": step, "operands": found}))
        if self.run.folder is not None:
            write_text_atomically(self.run.folder / FILE, "\n".join(self.lines) + "\n")


def _label(name: str, key: str, given: Mapping[str, LinearProducts]) -> str:
    """Name a module's parameters only if it has several."""
    return name if len(given) == 1 else f"{name}.{'+'.join(k for k in given if given[k] is given[key])}"
