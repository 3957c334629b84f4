"""Copies a step's flags from the device to the host: stop requests, and whether the step was skipped.

On a CPU that is read at once. Elsewhere the host would wait for the device, and the device then for the host:
the numbers of a step travel to the host meanwhile and are read after the next one. Every rank reads the same
numbers after the same step, so all of them stop, go back or give up after the same one either way.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from nanotrain_core.contracts import StepStats


@attrs.define(frozen=True)
class StepFlags:
    """The numbers of one step, on the host."""

    step: int
    """The first is 1."""
    requests: Sequence[float]
    """As :meth:`~nanotrain_core.run.stop.StopRequest.agree` takes them."""
    skipped: bool
    grad_norm: float


class AsyncReadback:
    """A step's numbers while they travel to the host."""

    def __init__(self, step: int, requests: torch.Tensor, stats: StepStats) -> None:
        """``requests``: summed over all ranks, float64 on the device."""
        self.step = step
        skipped = torch.as_tensor(stats.skipped).to(requests.device, non_blocking=True)
        numbers = torch.stack([skipped.to(requests), stats.grad_norm.to(requests)])
        self.numbers = torch.cat([requests, numbers]).to("cpu", non_blocking=True)
        self.arrived: torch.Event | None = None
        if requests.device.type != "cpu":
            self.arrived = torch.Event(requests.device)
            self.arrived.record()

    def read(self) -> StepFlags:
        """Return the numbers, at once if the device has done that step by now."""
        if self.arrived is not None:
            self.arrived.synchronize()
        *requests, skipped, grad_norm = self.numbers.tolist()
        return StepFlags(self.step, requests, bool(skipped), grad_norm)


class StepReadback:
    """Reads each step's numbers at once, or ``late``: after the next step."""

    def __init__(self, *, late: bool) -> None:
        self.late = late
        self._waiting: AsyncReadback | None = None

    def after(self, step: int, requests: torch.Tensor, stats: StepStats) -> StepFlags | None:
        """Take the numbers of a step; return what is known now, of this one or of the one before."""
        sent = AsyncReadback(step, requests, stats)
        if not self.late:
            return sent.read()
        before, self._waiting = self._waiting, sent
        return before.read() if before is not None else None

    def rest(self) -> StepFlags | None:
        """Wait for what is on its way, if there is any."""
        before, self._waiting = self._waiting, None
        return before.read() if before is not None else None

    def forget(self) -> None:
        """Forget what is on its way: the run goes back to before it."""
        self._waiting = None
