"""The ``replicas`` monitor: do ranks that hold the same weights hold the same weights?"""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch
import torch.distributed as dist

from nanotrain_core.builtin.configs import ReplicasConfig
from nanotrain_core.contracts import EndReport, Monitor, RunInfo, StepReport
from nanotrain_core.errors import Diverged


class Replicas(Monitor):
    """Compares parameter norms between ranks and stops the run at the first difference.

    A norm is the 2-norm of all parameters of a rank, summed in float64 in one fixed order, so equal
    weights give equal bits. At the end a table shows norm and memory of every rank.
    """

    def __init__(self, config: ReplicasConfig) -> None:
        self.config = config
        self.compared = 0

    def on_start(self, run: RunInfo) -> None:
        """Find the ranks that hold the same blocks as this one."""
        self.run = run
        mine = tuple((p.placement.name, p.placement.offset) for p in run.placed)
        everyone = self._gather(mine)
        self.twins = [rank for rank, other in enumerate(everyone) if other == everyone[run.rank]]

    def on_step(self, report: StepReport) -> None:
        """Compare.

        Raises:
            Diverged: on the ranks that see a difference, naming it.
        """
        if report.step % self.config.every:
            return
        self.norms = self._gather(self._norm())
        self.compared += 1
        for rank in self.twins:
            if self.norms[rank] != self.norms[self.twins[0]]:
                raise Diverged(
                    f"step {report.step}: rank {rank} has parameter norm {self.norms[rank]!r}, but rank "
                    f"{self.twins[0]}, which holds the same weights, {self.norms[self.twins[0]]!r}"
                )

    def on_end(self, report: EndReport) -> None:
        """Print every rank's norm and memory."""
        if report.reason == "failed":
            return
        rows = self._gather(self._memory())
        if self.run.rank == 0 and self.compared:
            print(f"parameter norms equal on all replicas at {self.compared} steps")
            print(
                f"{'rank':>4} {'parameter norm':>20} {'weights MB':>10} {'optimizer MB':>12} {'peak MB':>9}"
            )
            for rank, (weights, optimizer, peak) in enumerate(rows):
                print(
                    f"{rank:>4} {self.norms[rank]:>20.12f} {weights:>10.3f} {optimizer:>12.3f} {peak:>9.1f}"
                )

    def _norm(self) -> float:
        squares = [p.parameter.detach().double().square().sum() for p in self.run.placed]
        return float(torch.stack(squares).sum().sqrt().item())

    def _memory(self) -> tuple[float, float, float]:
        """Return megabytes of weights, of optimizer state, and at the peak of the process or GPU."""
        weights = sum(p.parameter.nbytes for p in self.run.placed)
        if self.run.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.run.device)
        else:
            unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return weights / 1e6, self.run.optimizer_bytes / 1e6, peak / 1e6

    def _gather(self, value: Any) -> list[Any]:
        if self.run.world_size == 1:
            return [value]
        everyone: list[Any] = [None] * self.run.world_size
        dist.all_gather_object(everyone, value)
        return everyone
