"""The ``replicas`` monitor: do ranks that hold the same weights hold the same bits?"""

from __future__ import annotations

import resource
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nanotrain_core.builtin.configs import ReplicasConfig
from nanotrain_core.contracts import EndReport, Monitor, RunInfo, StepReport
from nanotrain_core.errors import Corrupted
from nanotrain_core.layout import Span
from nanotrain_core.placement import PlacedParameter

#: A block: its parameter and where it begins.
Held = tuple[str, tuple[int, ...]]
#: An integer type with as many bytes as a number has.
INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Numbers hashed at once, to bound the memory of a check.
CHUNK = 1 << 22


def hash_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return an int64 hash of a tensor's bits: each number's bits times an odd number of its place, summed.

    Modulo 2^64 a change of one number always changes the sum, since an odd factor loses no bit; changes
    of several cancel out with a chance of about 2^-64.
    """
    bits = tensor.detach().reshape(-1).view(INTEGER[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for first in range(0, bits.numel(), CHUNK):
        part = bits[first : first + CHUNK].to(torch.int64)
        place = torch.arange(first, first + part.numel(), device=tensor.device)
        mixed = place * 0x5851F42D4C957F2D  # spreads neighbouring places over all 64 bits
        total += (part * ((mixed ^ (mixed >> 29)) | 1)).sum()
    return total


class Replicas(Monitor):
    """Compares hashes of weights between the ranks that hold them, and stops the run at a difference.

    Two integers a parameter are all-reduced over the ranks that hold it, and one flag over all. Only
    after a difference do ranks tell one another everything, to name who is wrong. At the end a table
    shows what every rank holds.
    """

    def __init__(self, config: ReplicasConfig) -> None:
        self.config = config
        self.compared = 0

    def on_start(self, run: RunInfo) -> None:
        """Group this rank's parameters by the ranks that hold the same blocks."""
        self.run = run
        self.groups: dict[Span, list[PlacedParameter]] = defaultdict(list)
        for placed in run.placed:
            span = placed.placement.replica_span(run.mesh.layout)
            if span:
                self.groups[span].append(placed)

    def on_step(self, report: StepReport) -> None:
        """Compare.

        Raises:
            Corrupted: on every rank, naming parameter and ranks.
        """
        if report.step % self.config.every:
            return
        self.compared += 1
        differs = torch.zeros(1, dtype=torch.int64, device=self.run.device)
        for span in sorted(self.groups):
            hashes = torch.stack([hash_bits(placed.parameter) for placed in self.groups[span]])
            most = torch.stack([hashes, ~hashes])  # ~ turns the order round: the greatest is the least
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.run.mesh.group_of(span))
            differs += (most[0] != ~most[1]).any()
        self.run.mesh.all_reduce(differs, op=dist.ReduceOp.MAX)
        if differs.item():
            everyone = self.run.mesh.gather(
                {held(p): hash_bits(p.parameter).item() for group in self.groups.values() for p in group}
            )
            raise Corrupted(f"step {report.step}: {name_the_wrong(everyone)}")

    def on_end(self, report: EndReport) -> None:
        """Print what every rank holds."""
        if report.reason == "failed":
            return
        rows = self.run.mesh.gather(self._memory())
        if self.run.rank == 0 and self.compared:
            print(f"weights equal, bit for bit, on all ranks that share them, at {self.compared} steps")
            print(f"{'rank':>4} {'weights MB':>10} {'optimizer MB':>12} {'peak MB':>9}")
            for rank, (weights, optimizer, peak) in enumerate(rows):
                print(f"{rank:>4} {weights:>10.3f} {optimizer:>12.3f} {peak:>9.1f}")

    def _memory(self) -> tuple[float, float, float]:
        """Return megabytes of weights, of optimizer state, and at the peak of the process or GPU."""
        weights = sum(p.parameter.nbytes for p in self.run.placed)
        if self.run.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.run.device)
        else:
            unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return weights / 1e6, self.run.optimizer_bytes / 1e6, peak / 1e6


def held(placed: PlacedParameter) -> Held:
    """Return which block of which parameter it is."""
    return placed.placement.name, tuple(placed.placement.offset)


def name_the_wrong(everyone: Sequence[dict[Held, int]]) -> str:
    """Say which parameters differ, and which ranks are alone with theirs, given each rank's hashes."""
    wrong = []
    for block in sorted({block for hashes in everyone for block in hashes}):
        theirs = {rank: hashes[block] for rank, hashes in enumerate(everyone) if block in hashes}
        if len(set(theirs.values())) > 1:
            wrong.append(f"{block[0]} {_who(theirs)}")
    more = f" (and {len(wrong) - 1} more parameters)" if len(wrong) > 1 else ""
    return f"{wrong[0]}{more}"


def _who(hashes: dict[int, Any]) -> str:
    """Say who holds other bits than the majority, if there is one."""
    (usual, count), *_ = Counter(hashes.values()).most_common()
    alone = [rank for rank, value in hashes.items() if value != usual]
    if count <= len(hashes) / 2:
        return f"has other bits on {_ranks(hashes)} each, and there is no majority to trust"
    others = [rank for rank in hashes if rank not in alone]
    return f"has other bits on {_ranks(alone)} than on {_ranks(others)}, which agree"


def _ranks(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(map(str, numbers))}"
