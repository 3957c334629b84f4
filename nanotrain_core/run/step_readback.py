"""Copies a step's flags from the device to the host: stop requests, and whether the step was skipped.

On a CPU they are read immediately. On other devices that would make the host wait for the device, and then
the device for the host: instead the values are copied asynchronously and read after the next step. Every rank
reads the same values after the same step, so all of them stop or roll back after the same one either way.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from nanotrain_core.contracts import StepStats


@attrs.define(frozen=True)
class StepFlags:
    """The flags of one step, on the host."""

    step: int
    """The step's number; the first is 1."""
    requests: Sequence[float]
    """In the form that :meth:`~nanotrain_core.run.stop.StopRequest.agree` takes."""
    skipped: bool
    grad_norm: float


class AsyncReadback:
    """A step's values during the copy to the host."""

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
        """Return the values, without waiting if the device has completed that step."""
        if self.arrived is not None:
            self.arrived.synchronize()
        *requests, skipped, grad_norm = self.numbers.tolist()
        return StepFlags(self.step, requests, bool(skipped), grad_norm)


class StepReadback:
    """Reads each step's values immediately, or ``late``: after the next step."""

    def __init__(self, *, late: bool) -> None:
        self.late = late
        self._waiting: AsyncReadback | None = None

    def after(self, step: int, requests: torch.Tensor, stats: StepStats) -> StepFlags | None:
        """Take the values of a step; return those available now, of this step or the previous one."""
        sent = AsyncReadback(step, requests, stats)
        if not self.late:
            return sent.read()
        before, self._waiting = self._waiting, sent
        return before.read() if before is not None else None

    def rest(self) -> StepFlags | None:
        """Wait for values in flight, if there are any."""
        before, self._waiting = self._waiting, None
        return before.read() if before is not None else None

    def forget(self) -> None:
        """Discard values in flight: the run rolls back to before them."""
        self._waiting = None
