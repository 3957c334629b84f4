"""The ``bit_flips`` monitor: detects bits that change in memory that no code writes to."""

from __future__ import annotations

import torch
import torch.distributed as dist

from nanotrain_core.builtin.configs import BitFlipsConfig
from nanotrain_core.contracts import EndReport, Monitor, RunInfo, StepEnd, UpdateReport
from nanotrain_core.errors import Corrupted
from nanotrain_core.monitors.replicas import hash_bits
from nanotrain_core.precision.quantized_storage import storage_of


class BitFlips(Monitor):
    """Hashes weights, master weights and optimizer state after an update, and again before the next one.

    Nothing writes to them in between, so a difference is a fault of the memory, or a stray write. Unlike
    ``replicas`` this needs no second copy: it covers what ZeRO shards over ranks, and expert weights that one
    rank holds alone. Each rank compares its own; one flag is all-reduced.
    """

    reads_weights = False

    def __init__(self, config: BitFlipsConfig) -> None:
        self.config = config
        self.end: StepEnd | None = None
        """The step whose state was hashed and is to be compared."""

    def on_start(self, run: RunInfo) -> None:
        """Remember the run."""
        self.run = run

    def on_step_end(self, end: StepEnd) -> None:
        """Hash the state after every ``every``-th step."""
        self.end = None
        if end.step % self.config.every == 0:
            self.end, self.hashes = end, self._hashes(end)

    def on_before_update(self, update: UpdateReport) -> None:
        """Compare before the update changes the state."""
        self._compare()

    def on_before_save(self, step: int) -> None:
        """Compare before the last checkpoint of a run, which would save a flipped bit."""
        self._compare()

    def on_end(self, report: EndReport) -> None:
        """Compare at the end of a run that saves nothing."""
        if report.reason != "failed":
            self._compare()

    def _hashes(self, end: StepEnd) -> torch.Tensor:
        """Return the hash of each block, on the run's device: offloaded ones are hashed where they are."""
        stored = (storage_of(block.tensor) for block in end.state().blocks)
        hashes = [hash_bits(tensor).to(self.run.device) for tensor in stored]
        return torch.stack(hashes) if hashes else torch.zeros(0, dtype=torch.int64, device=self.run.device)

    def _compare(self) -> None:
        """Compare the current hashes with those of :attr:`end`, if they have not been compared.

        Raises:
            Corrupted: on every rank, naming the step, the rank and the first tensor that changed.
        """
        if self.end is None:
            return
        end, self.end = self.end, None
        self.run.monitor_barrier()
        differs = self._hashes(end) != self.hashes
        flag = differs.any().long().view(1)
        self.run.mesh.all_reduce(flag, op=dist.ReduceOp.MAX)
        if not flag.item():
            return
        blocks = end.state().blocks
        changed = [block.name for block, wrong in zip(blocks, differs.tolist(), strict=True) if wrong]
        everyone: list[list[str]] = self.run.mesh.gather(changed)
        rank, names = next((rank, names) for rank, names in enumerate(everyone) if names)
        more = sum(map(len, everyone)) - 1
        raise Corrupted(
            f"{names[0]} has other bits on rank {rank} than the update of step {end.step} left, and nothing "
            f"writes to it until the next one{f' (and {more} more tensors)' if more else ''}"
        )
