"""The monitor ``replay``: the same microbatch on every data-parallel replica, compared bit for bit."""

from __future__ import annotations

import socket
import time

import structlog
import torch

from nanotrain_core.api import Corrupted, NanotrainError
from nanotrain_core.api.torch import EndReport, Monitor, RunInfo, UpdateReport, hash_bits
from nanotrain_replay import ReplayConfig
from nanotrain_replay.blame import Hashes, Report, blame, order_of
from nanotrain_replay.counterparts import counterparts

log = structlog.get_logger("nanotrain.replay")


class Replay(Monitor):
    """See the README.

    Each rank hashes the losses, hidden states and gradients of the replay, and one integer of each is
    all-reduced. Only after a difference is the microbatch replayed once more and are all hashes gathered.
    A rank without counterparts replays it twice and compares itself with itself.
    """

    def __init__(self, config: ReplayConfig) -> None:
        self.config = config
        self.replayed = 0
        self.seconds: float | None = None
        """How long the replay of this step took, until it is published."""

    def on_start(self, run: RunInfo) -> None:
        """Find the ranks that compute the same as this one.

        Raises:
            NanotrainError: kernels of a GPU may add in any order, so sound ranks would differ; or torch
                reduces gradients itself, and no microbatch can be replayed without a trace in them.
        """
        self.run = run
        if any(placed.dtensor is not None for placed in run.placed):
            raise NanotrainError(
                "monitor replay cannot replay a microbatch: parameters are DTensors, whose gradients torch "
                "reduces itself; expected a wrapper that leaves plain tensors, such as ddp, or no replay"
            )
        if run.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
            raise NanotrainError("monitor replay compares bits; expected run.deterministic = true on a GPU")
        self.mine = counterparts(run.mesh, [placed.placement for placed in run.placed])

    def on_before_update(self, update: UpdateReport) -> None:
        """Replay and compare, if the interval is due.

        Raises:
            Corrupted: on every rank, naming what differs first, and the ranks.
        """
        if update.step % self.config.every:
            return
        began = time.perf_counter()
        replica = update.step // self.config.every % self.run.mesh.size(*self.run.mesh.layout.row_dims)
        hashes = self._replay(update, replica)
        again = self._replay(update, replica) if len(self.mine) == 1 else None
        self.replayed += 1
        if self._differ(hashes, again):
            self._raise(update, replica, hashes, again)
        self.seconds = time.perf_counter() - began

    def on_after_update(self, update: UpdateReport) -> None:
        """Publish the time."""
        if self.seconds is not None:
            self.run.metrics.scalar("replay/seconds", self.seconds)
            self.seconds = None

    def _replay(self, update: UpdateReport, replica: int) -> Hashes:
        """Return the hash of all that this rank computes, by order and description."""
        found = enumerate(update.replay(replica))
        return {order_of(each, n): hash_bits(each.tensor) for n, each in found if not each.received}

    def _differ(self, hashes: Hashes, again: Hashes | None) -> bool:
        """Return, on all ranks, whether any counterparts differ."""
        mesh = self.run.mesh
        own = hash_bits(torch.stack([*hashes.values()]))
        everyone = torch.zeros(mesh.world_size, dtype=torch.int64, device=mesh.device)
        everyone[mesh.rank] = own
        mesh.all_reduce(everyone)
        wrong = (everyone[list(self.mine)] != own).any()
        if again is not None:
            wrong |= hash_bits(torch.stack([*again.values()])) != own
        flag = wrong.long().view(1)
        mesh.all_reduce(flag)
        return bool(flag.item())

    def _raise(self, update: UpdateReport, replica: int, hashes: Hashes, again: Hashes | None) -> None:
        """Replay once more, to tell a lasting fault from a passing one, and name the first difference."""
        again = self._replay(update, replica) if again is None else again
        runs = [{key: int(value) for key, value in each.items()} for each in (hashes, again)]
        everyone = self.run.mesh.gather(Report(self.mine, socket.gethostname(), *runs))
        raise Corrupted(f"step {update.step}: {blame(everyone)}")

    def on_end(self, report: EndReport) -> None:
        """Log that every replay agreed."""
        if self.replayed and self.run.rank == 0 and report.reason != "failed":
            log.info("replayed microbatches were computed alike, bit for bit", replays=self.replayed)
