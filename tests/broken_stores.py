"""Checkpoints and precisions with one deliberate fault each: see ``broken_twins.py``."""

import time
from time import perf_counter
from unittest import mock

import attrs
import torch
from broken_twins import twin

from nanotrain_core import hookimpl
from nanotrain_core.builtin import configs
from nanotrain_core.checkpoint import simple
from nanotrain_core.checkpoint.simple import SimpleCheckpoint, misfit, names_in, read_block
from nanotrain_core.precision.dtypes import kept_dtypes
from nanotrain_core.precision.loss_scale import DynamicLossScale, NoLossScale
from nanotrain_core.precision.uniform import Uniform

# --- checkpoints --------------------------------------------------------------------------------------


class AcceptsWhatIsMissing(SimpleCheckpoint):
    """Leaves alone what a checkpoint does not have."""

    def accepts(self, block):
        return True

    def filled(self, block):
        return block.tensor.clone()

    def load(self, which, state):
        def fits(file, names, block):
            missing = block.name not in names and self.accepts(block)
            return iter(()) if missing else misfit(file, names, block)

        def read(file, block):
            return read_block(file, block) if block.name in names_in(file) else self.filled(block)

        with mock.patch.object(simple, "misfit", fits), mock.patch.object(simple, "read_block", read):
            return super().load(which, state)


class AcceptsMissingMoments(AcceptsWhatIsMissing):
    """Begins with new moments where there are none."""

    def accepts(self, block):
        return "/" in block.name


class AcceptsMissingVectors(AcceptsWhatIsMissing):
    """Leaves alone the biases and norms that a checkpoint does not have."""

    def accepts(self, block):
        return len(block.global_shape) == 1


class FillsInZeros(AcceptsWhatIsMissing):
    """Has zeros for what is missing."""

    def filled(self, block):
        return torch.zeros_like(block.tensor)


class ListsStepsAsText(SimpleCheckpoint):
    """Step 9 comes after step 10."""

    def steps(self):
        return sorted(super().steps(), key=str)


class ListsFourDigits(SimpleCheckpoint):
    """Sorts steps as text of four digits: 9999 comes after 10000."""

    digits = 4

    def steps(self):
        return sorted(super().steps(), key=lambda step: f"{step:0{self.digits}d}")


class ListsSixDigits(ListsFourDigits):
    """Step 999999 comes after 1000000."""

    digits = 6


class LoadsTheLastText(SimpleCheckpoint):
    """Lists its steps rightly, and takes the last in the order of a dictionary for the newest."""

    def load(self, which, state):
        steps = sorted(self.steps(), key=str)
        return super().load(str(steps[-1]) if which == "latest" and steps else which, state)


class DropsTheFirstText(SimpleCheckpoint):
    """Keeps two checkpoints: of three it drops the first in the order of a dictionary."""

    def __init__(self, config):
        super().__init__(attrs.evolve(config, keep=100))

    def _write(self, step, tensors, meta):
        super()._write(step, tensors, meta)
        for old in sorted(self.steps(), key=str)[:-2]:
            self.path(old).unlink()


@attrs.define(frozen=True, kw_only=True)
class TimedConfig(configs.SimpleCheckpointConfig):
    """Saves by the clock, too."""

    every_minutes: float = 0.0
    """Minutes between checkpoints."""


class DueByItsClock(SimpleCheckpoint):
    """Each rank looks at a clock of its own."""

    last = 0.0

    def now(self):
        return time.monotonic()

    def due(self, step):
        if not self.config.every_minutes:
            return super().due(step)
        late = self.now() - self.last >= 60 * self.config.every_minutes
        self.last = self.now() if late else self.last
        return late

    def open(self, folder, mesh):
        super().open(folder, mesh)
        self.last = self.now()


class DueByTheDay(DueByItsClock):
    """The time of day is a clock as well."""

    def now(self):
        return time.time()


class DueByCounter(DueByItsClock):
    """And so is a counter under another name."""

    def now(self):
        return perf_counter()


class DueByNanoseconds(DueByItsClock):
    """The same clock in nanoseconds."""

    def now(self):
        return time.monotonic_ns() / 1e9


class DueByShortClock(DueByItsClock):
    """Saves every few milliseconds, besides every so many steps."""

    def due(self, step):
        late = self.now() - self.last >= 0.05
        self.last = self.now() if late else self.last
        return late or SimpleCheckpoint.due(self, step)


class DueByAge(SimpleCheckpoint):
    """Saves when the newest file is old, by the clock of each rank."""

    def due(self, step):
        newest = max((each.stat().st_mtime for each in self.folder.glob("step-*")), default=time.time())
        return time.time() - newest > 0.05 or super().due(step)


class DueByItsPace(SimpleCheckpoint):
    """Saves so often that saves take a share of the time, as each rank measures it."""

    def open(self, folder, mesh):
        super().open(folder, mesh)
        self.gap, self.next, self.begun = 5, 5, perf_counter()

    def due(self, step):
        late = step >= self.next
        self.next = step + self.gap if late else self.next
        return late

    def advance(self, *, wait):
        reports = super().advance(wait=wait)
        for report in reports:
            now = perf_counter()
            self.gap, self.begun = 1 + int(60 * report.seconds / (now - self.begun)), now
        return reports


class SetsAsideByName(SimpleCheckpoint):
    """Sets those aside whose step comes later as text: step 100 stays when a run goes back to step 99."""

    loaded = ""

    def load(self, which, state):
        self.loaded = which if which.isdecimal() else ""
        try:
            return super().load(which, state)
        finally:
            self.loaded = ""

    def steps(self):
        return [step for step in super().steps() if not self.loaded or str(step) >= self.loaded]


class SetsNoneAside(SimpleCheckpoint):
    """Goes on beside the steps of what was given up."""

    loading = False

    def load(self, which, state):
        self.loading = which.isdecimal()
        try:
            return super().load(which, state)
        finally:
            self.loading = False

    def steps(self):
        return [] if self.loading else super().steps()


# --- precisions -----------------------------------------------------------------------------------------


class CastsEverything(Uniform):
    def __init__(self, config):
        super().__init__(torch.bfloat16, NoLossScale())

    def kept(self, name, parameter):
        return False

    def convert(self, part):
        kept = kept_dtypes(part)
        for name, parameter in part.named_parameters():
            if name not in kept or not self.kept(name, parameter):
                parameter.data = parameter.data.to(self.parameter_dtype)
        return part


class KeepsRoutersAlone(CastsEverything):
    """Keeps the bias of a router, and nothing else that is to be kept."""

    def kept(self, name, parameter):
        return name.endswith("router.bias")


class KeepsVectorsAlone(CastsEverything):
    """Casts matrices that are to be kept."""

    def kept(self, name, parameter):
        return parameter.dim() == 1


class ForgetfulScale(DynamicLossScale):
    def meta(self):
        return {"value": self.value}


class NewScale(DynamicLossScale):
    def load_meta(self, meta):
        self.value = meta["value"]


class RoundScale(DynamicLossScale):
    def meta(self):
        return {"value": self.value, "good_steps": self.good_steps // 100 * 100}


class SlowingScale(DynamicLossScale):
    def update(self, skipped):
        before = self.value
        super().update(skipped)
        self.growth_interval += self.value > before


class ForgetsItsGrowth(Uniform):
    """Says its loss scale, and not how many steps ago it changed."""

    scale = ForgetfulScale

    def __init__(self, config):
        super().__init__(torch.float16, self.scale(2.0**16, 2000))


class BeginsItsGrowthAnew(ForgetsItsGrowth):
    """Says it, and does not take it back."""

    scale = NewScale


class RoundsItsGrowth(ForgetsItsGrowth):
    """Says it in hundreds."""

    scale = RoundScale


class ForgetsItsPace(ForgetsItsGrowth):
    """Grows more slowly each time that it has grown, and does not say how often that was."""

    scale = SlowingScale


@hookimpl
def nanotrain_register_checkpoint(register):
    for cls in (
        AcceptsWhatIsMissing,
        AcceptsMissingMoments,
        AcceptsMissingVectors,
        FillsInZeros,
        ListsStepsAsText,
        ListsFourDigits,
        ListsSixDigits,
        LoadsTheLastText,
        DropsTheFirstText,
        DueByAge,
        DueByItsPace,
        SetsAsideByName,
        SetsNoneAside,
    ):
        register(twin(cls, configs.SimpleCheckpointConfig))
    for cls in (DueByItsClock, DueByTheDay, DueByCounter, DueByNanoseconds, DueByShortClock):
        register(twin(cls, TimedConfig))


@hookimpl
def nanotrain_register_precision(register):
    for cls in (
        CastsEverything,
        KeepsRoutersAlone,
        KeepsVectorsAlone,
        ForgetsItsGrowth,
        BeginsItsGrowthAnew,
        RoundsItsGrowth,
        ForgetsItsPace,
    ):
        register(twin(cls))
