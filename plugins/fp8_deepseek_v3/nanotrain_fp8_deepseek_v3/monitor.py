"""Reports how rounding to eight bits affects the operands of each module: magnitudes and underflow.

On a watched step every rank rounds its operands once more, to count them, and publishes the counts
with the next logged step; other steps cost nothing. The run's own values are never modified.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import isnan

import attrs
from torch import nn

from nanotrain_core.api import append_line
from nanotrain_core.api.torch import (
    GEMMBackend,
    MetricsReport,
    Monitor,
    Passes,
    RollbackReport,
    RunInfo,
    UpdateReport,
    dispatch_codec,
    gemms_of,
    use_dispatch_codec,
)
from nanotrain_fp8_deepseek_v3 import FP8MonitorConfig
from nanotrain_fp8_deepseek_v3.precision import Codec
from nanotrain_fp8_deepseek_v3.recipe import LowBitGEMM
from nanotrain_fp8_deepseek_v3.tallies import Figures, Key, figures, publish
from nanotrain_fp8_deepseek_v3.watched import SENT, Watch, Watched, WatchedCodec, label

#: In the run folder: a line for each watched step. A resumed run appends: the last line of a step counts.
FILE = "fp8.jsonl"


class FP8Monitor(Monitor):
    """The ``fp8`` monitor."""

    reads_weights = False

    def __init__(self, config: FP8MonitorConfig) -> None:
        self.config, self.watch = config, Watch()
        self.own: list[Key] | None = None
        """Operands on this rank."""
        self.watched: list[int] = []
        """Watched steps, from the last reported one on: a GPU's figures arrive a logged step late."""
        self.passes: list[Passes] = []
        """Passes of the monitored modules: on watched steps their compiled layers run eagerly."""

    def on_start(self, run: RunInfo) -> None:
        """Wrap the backends with counters, and gather the operands of all ranks. Collective."""
        self.run = run
        if self.own is None:
            self.own = [key for part in run.parts for key in self._attach(part)]
        self.rows = list(dict.fromkeys(key for rank in run.mesh.gather(self.own) for key in rank))
        self._begin(after=run.first_step)

    def on_before_update(self, update: UpdateReport) -> None:
        """Publish a watched step, and decide whether to watch the next."""
        if self.watch.on:
            publish(self.watch.tallies, self.run.metrics)
            self.watched.append(update.step)
        self._begin(after=update.step)

    def on_metrics(self, report: MetricsReport) -> None:
        """Report what all ranks counted in the watched steps since the last logged one."""
        found = figures(report.values, self.rows)
        if self.run.rank == 0 and found:
            step = max((step for step in self.watched if step <= report.step), default=report.step)
            self.watched = [each for each in self.watched if each >= step]
            self._tell(step, found)

    def on_rollback(self, report: RollbackReport) -> None:
        """Continue from an earlier step."""
        self.watched = [step for step in self.watched if step <= report.restored]
        self._begin(after=report.restored)

    def _begin(self, *, after: int) -> None:
        self.watch.begin(on=after % self.config.every == 0)
        for passes in self.passes:
            passes.eager = self.watch.on

    def _attach(self, part: nn.Module) -> Iterator[Key]:
        """Wrap rounding backends with counters, and yield what they count."""
        for name, module in part.named_modules():
            codec, gemms = dispatch_codec(module), gemms_of(module)
            if isinstance(codec, Codec):
                use_dispatch_codec(module, WatchedCodec(codec, self.watch, name, module))
                yield name, SENT
            found = rounding_of(gemms.backends) if gemms else {}
            if gemms and found:
                watched = self._watched(name, module, found)
                gemms.backends.update(watched)
                if gemms.passes not in self.passes:
                    self.passes.append(gemms.passes)
                for each in dict.fromkeys(watched.values()):
                    yield from ((each.name, operand) for operand in each.recipe.operands)

    def _watched(self, name: str, module: nn.Module, found: Mapping[str, LowBitGEMM]) -> dict[str, Watched]:
        """Return counting backends; those shared between parameters stay shared."""
        own = {
            backend: Watched(backend, self.watch, label(name, key, found), module)
            for key, backend in found.items()
        }
        return {key: own[backend] for key, backend in found.items()}

    def _tell(self, step: int, found: Mapping[Key, Figures]) -> None:
        """Print the worst operands, and write all."""
        print(f"step={step} fp8: {'; '.join(worst(found))}", flush=True)
        modules: dict[str, dict[str, object]] = defaultdict(dict)
        for (module, operand), each in found.items():
            modules[module][operand] = attrs.asdict(each)
        if self.run.folder is not None:
            append_line(self.run.folder / FILE, json.dumps({"step": step, "modules": modules}))


def rounding_of(backends: Mapping[str, GEMMBackend]) -> dict[str, LowBitGEMM]:
    """Return the backends that round their operands, by parameter."""
    return {name: backend for name, backend in backends.items() if isinstance(backend, LowBitGEMM)}


def worst(found: Mapping[Key, Figures]) -> Sequence[str]:
    """Return the operands with the most underflow, the largest magnitudes, and the most non-finite values."""
    lost = max(found, key=lambda key: found[key].underflow)
    largest = max(found, key=lambda key: (isnan(found[key].amax), found[key].amax))
    broken = max(found, key=lambda key: found[key].overflow)
    lines = [
        f"most underflow {found[lost].underflow:.2%} in {' '.join(lost)}",
        f"largest {found[largest].amax:.3g} in {' '.join(largest)}",
    ]
    if found[broken].overflow:
        lines.append(f"overflow {found[broken].overflow:.2%} in {' '.join(broken)}")
    return lines
