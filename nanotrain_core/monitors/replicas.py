"""The ``replicas`` monitor: checks that ranks that hold the same weights hold the same bits."""

from __future__ import annotations

import resource
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from nanotrain_core.builtin.configs import ReplicasConfig
from nanotrain_core.checkpoint.raw_bytes import raw_bytes
from nanotrain_core.contracts import EndReport, Monitor, RollbackReport, RunInfo, UpdateReport
from nanotrain_core.errors import Corrupted
from nanotrain_core.layout.layout import Span
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import PlacedParameter
from nanotrain_core.precision.quantized_storage import storage_of

#: A block: its parameter and offset.
Held = tuple[str, tuple[int, ...]]
#: Words of 8 bytes hashed at once: on a CPU what fits in cache, elsewhere a bound on memory and launches.
CHUNK = {"cpu": 1 << 16}
CHUNK_ELSEWHERE = 1 << 20


def hash_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return an int64 hash of a tensor's bits: the sum of all 8-byte words, each times an odd factor.

    Modulo 2^64 a change of one word always changes the sum, since an odd factor loses no bit; changes
    of several cancel out with a probability of about 2^-64.
    """
    raw = raw_bytes(tensor)
    if len(raw) % 8 or raw.storage_offset() % 8:
        raw = pad(raw, (0, -len(raw) % 8))
    chunk = CHUNK.get(tensor.device.type, CHUNK_ELSEWHERE)
    parts = torch.split(raw.view(torch.int64), chunk)
    within, each = factors(0, chunk, tensor.device), factors(chunk, len(parts), tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part, factor in zip(parts, each, strict=True):
        total += (part * within[: len(part)]).sum() * factor
    return total


@lru_cache(maxsize=64)
def factors(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return odd factors [count] that depend on the position in all 64 bits, from position ``first`` on."""
    mixed = torch.arange(first, first + count, device=device) * 0x5851F42D4C957F2D
    return (mixed ^ (mixed >> 29)) | 1


def differing(parameters: Sequence[PlacedParameter], span: Span, mesh: Mesh) -> torch.Tensor:
    """Return which of N parameters have other bits on some rank of ``span``: bool [N]. Collective there."""
    hashes = torch.stack([hash_bits(storage_of(placed.parameter)) for placed in parameters])
    most = torch.stack([hashes, ~hashes])  # ~ reverses the order: the maximum becomes the minimum
    with mesh.waits.collectives:
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mesh.group_of(span))
    return most[0] != ~most[1]


class Replicas(Monitor):
    """Compares hashes of weights between the ranks that hold them, and stops the run at a difference.

    Two integers per parameter are all-reduced over the ranks that hold it, and one flag over all. Only
    after a difference are all hashes gathered, to name the rank that differs. At the end a table
    shows what every rank holds.

    They are compared before the update. If the update overwrites copies, from a range that one rank updates
    for all or from masters, a bit flip is gone afterwards, though a gradient was computed with it. And they
    are compared before they are saved, so that no bit flip gets into a checkpoint.
    """

    def __init__(self, config: ReplicasConfig) -> None:
        self.config = config
        self.compared = 0
        self.saved = -1
        """The step after which weights were last compared before a save."""

    def on_start(self, run: RunInfo) -> None:
        """Group this rank's parameters by the ranks that hold the same blocks."""
        self.run, self.first = run, run.first_step + 1
        self.groups: dict[Span, list[PlacedParameter]] = defaultdict(list)
        for placed in run.placed:
            span = placed.placement.replica_span(run.mesh.layout)
            if span:
                self.groups[span].append(placed)

    def on_rollback(self, report: RollbackReport) -> None:
        """Compare what was read from the checkpoint, as at the start."""
        self.first = report.restored + 1

    def on_before_update(self, update: UpdateReport) -> None:
        """Compare the weights that the step's gradient was computed with, if the interval is due."""
        if update.step == self.first or update.step % self.config.every == 0:
            self._compare(update.step)

    def on_before_save(self, step: int) -> None:
        """Compare what is about to be saved, whatever the interval."""
        self._compare(step)
        self.saved = step

    def _compare(self, step: int) -> None:
        """Compare the hashes.

        Raises:
            Corrupted: on every rank, naming parameter and ranks.
        """
        self.compared += 1
        self.run.monitor_barrier()
        differs = torch.zeros(1, dtype=torch.int64, device=self.run.device)
        for span in sorted(self.groups):
            differs += differing(self.groups[span], span, self.run.mesh).any()
        self.run.mesh.all_reduce(differs, op=dist.ReduceOp.MAX)
        if differs.item():
            placed = [each for group in self.groups.values() for each in group]
            own = {held(each): hash_bits(storage_of(each.parameter)).item() for each in placed}
            everyone = self.run.mesh.gather(own)
            raise Corrupted(f"step {step}: {name_the_wrong(everyone)}")

    def on_end(self, report: EndReport) -> None:
        """Compare once more if not done by a save, and print what every rank holds."""
        if report.reason == "failed":
            return
        if self.saved != report.step:
            self._compare(report.step)
        rows = self.run.mesh.gather(self._memory())
        if self.run.rank == 0:
            times = f"{self.compared} comparison{'s' if self.compared > 1 else ''}"
            print(f"weights equal, bit for bit, on all ranks that share them, in {times}")
            print(f"{'rank':>4} {'weights MB':>10} {'optimizer MB':>12} {'peak MB':>9}")
            for rank, (weights, optimizer, peak) in enumerate(rows):
                print(f"{rank:>4} {weights:>10.3f} {optimizer:>12.3f} {peak:>9.1f}")
            print(shares([optimizer * 1e6 for _, optimizer, _ in rows], self.run.parameters))

    def _memory(self) -> tuple[float, float, float]:
        """Return megabytes of weights, of optimizer state, and of the peak of the process or GPU."""
        weights = sum(storage_of(p.parameter).nbytes for p in self.run.placed)
        if self.run.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.run.device)
        else:
            unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return weights / 1e6, self.run.optimizer_bytes / 1e6, peak / 1e6


def shares(sizes: Sequence[float], parameters: int) -> str:
    """Return the largest and the mean of ranks' bytes of optimizer state, also as a multiple of P/N.

    AdamW's two float32 moments sharded over all N ranks are 8P/N, with float32 masters 12P/N; that many
    times N where every rank holds all of them.
    """
    mean, unit = sum(sizes) / len(sizes), parameters / len(sizes)
    most = f"{max(sizes):,.0f} bytes at most = {max(sizes) / unit:.2f} P/N"
    average = f"{mean:,.0f} in the mean = {mean / unit:.2f} P/N"
    return (
        f"optimizer state of a rank: {most}, {average}, P = {parameters:,} parameters, N = {len(sizes)} ranks"
    )


def held(placed: PlacedParameter) -> Held:
    """Describe which block of which parameter it is."""
    return placed.placement.name, tuple(placed.placement.offset)


def name_the_wrong(everyone: Sequence[dict[Held, int]]) -> str:
    """Return which parameters differ, and which ranks differ from the rest, given each rank's hashes."""
    wrong = []
    for block in sorted({block for hashes in everyone for block in hashes}):
        theirs = {rank: hashes[block] for rank, hashes in enumerate(everyone) if block in hashes}
        if len(set(theirs.values())) > 1:
            wrong.append(f"{block[0]} {_who(theirs)}")
    more = f" (and {len(wrong) - 1} more parameters)" if len(wrong) > 1 else ""
    return f"{wrong[0]}{more}"


def _who(hashes: dict[int, Any]) -> str:
    """Return the ranks whose bits differ from the majority's, if there is one."""
    (usual, count), *_ = Counter(hashes.values()).most_common()
    alone = [rank for rank, value in hashes.items() if value != usual]
    if count <= len(hashes) / 2:
        return f"has other bits on {_ranks(hashes)} each, and there is no majority to trust"
    others = [rank for rank in hashes if rank not in alone]
    return f"has other bits on {_ranks(alone)} than on {_ranks(others)}, which agree"


def _ranks(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(map(str, numbers))}"
