"""The uploads of a run, on one rank: at most one in progress, and the newest checkpoint, which waits for it.

All ranks take the same decisions, at points that all reach: after logged steps, saves and rollbacks.
"""

from __future__ import annotations

import time
from uuid import uuid4

import structlog
import torch
import torch.distributed as dist

from nanotrain_core.api.torch import Mesh
from nanotrain_object_store.flight import FileId, Flight, InStore
from nanotrain_object_store.prefix import Prefix
from nanotrain_object_store.staged import Staged
from nanotrain_object_store.store import Store
from nanotrain_object_store.stored import Sent

#: Times that the newest checkpoint is begun again, if what came to be in the store is not what was sent.
ATTEMPTS = 3


class Uploads:
    """The queue of uploads. All methods except :meth:`abandon` are collective."""

    def __init__(self, run: str, store: Store, prefix: Prefix | None, mesh: Mesh) -> None:
        """``prefix``: on rank 0 alone."""
        assert (prefix is not None) == (mesh.rank == 0), "rank 0 completes what all have uploaded"
        self.run, self.store, self.prefix, self.mesh = run, store, prefix, mesh
        self.flight: Flight | None = None
        self.pending: Staged | None = None
        self.uploaded: int | None = None
        """The newest step that this process knows to be in the store."""
        self.seconds: float | None = None
        """Duration of the last upload in seconds; set to None when it is published."""
        self.uploaded_at = time.monotonic()
        """When the newest checkpoint in the store was in place on the disk."""
        self.left_out = 0
        self.refused = ""
        """Why nothing is uploaded any more."""
        self._in_store: dict[FileId, InStore] = {}
        """This rank's files of the newest checkpoint that this process has uploaded."""
        self._down_since: float | None = None
        self._log = structlog.get_logger("nanotrain.object_store")

    @property
    def under_way(self) -> bool:
        """Whether a checkpoint is on its way, or waits."""
        return self.flight is not None or self.pending is not None

    def add(self, staged: Staged) -> None:
        """Upload a checkpoint, as soon as the one on its way is done; one that waits for that is left out."""
        if self.refused:
            staged.remove()
            return
        if self.pending is not None:
            self._leave_out(self.pending)
        self.pending = staged
        self.advance()

    def go_back(self, step: int) -> None:
        """Forget later steps than ``step``: the run has left them behind."""
        if self.pending is not None and self.pending.step > step:
            self.pending.remove()
            self.pending = None
        if self.flight is not None and self.flight.staged.step > step:
            self.flight.cancelled.set()
        if self.uploaded is not None and self.uploaded > step:
            self.uploaded = None
        if self.prefix is not None:
            self.prefix.leave_after(step)

    def advance(self, *, late: bool = False) -> None:
        """Check the upload in progress, and begin the next. ``late``, on rank 0: give up waiting for it."""
        flight = self.flight
        if flight is None:
            self._begin_next()
            return
        here = [flight.busy, bool(flight.trouble), late and self.mesh.rank == 0]
        flags = torch.tensor([float(flag) for flag in here], device=self.mesh.device)
        self.mesh.all_reduce(flags, op=dist.ReduceOp.MAX)
        busy, trouble, given_up = (bool(flag) for flag in flags.tolist())
        if trouble and self._down_since is None:
            self._tell_down(flight)
        if given_up:
            self.abandon()
            return
        if busy:
            if trouble and self.pending is not None:
                flight.cancelled.set()  # a newer one is worth more tries
            return
        everyone = self.mesh.gather((flight.problem, flight.sent))
        problem = next((f"rank {rank}: {text}" for rank, (text, _) in enumerate(everyone) if text), "")
        if not problem and not flight.completing:
            self._complete(flight, {name: file for _, sent in everyone for name, file in sent.items()})
            return
        self.flight = None
        self._done(flight, problem)
        self._begin_next()

    def _complete(self, flight: Flight, files: dict[str, Sent]) -> None:
        flight.completing, flight.sent = True, {}
        if self.prefix is not None:
            flight.complete(self.prefix, self.run, files)

    def _done(self, flight: Flight, problem: str) -> None:
        staged = flight.staged
        refused = self.mesh.gather(self.prefix.refused if self.prefix is not None else "")[0]
        if refused:
            self.refused = refused
            self.abandon()
        if not problem:
            self._tell_up()
            self.uploaded, self.uploaded_at = staged.step, staged.complete_at
            self._in_store = flight.in_store
            self.seconds = time.monotonic() - staged.complete_at
            if self.mesh.rank == 0:
                where = f"{self.store.url}/{flight.entry}"
                self._log.info("uploaded", step=staged.step, to=where, seconds=round(self.seconds, 1))
            if self.prefix is not None and self.prefix.sweep_problem:
                text = "old checkpoints could not be deleted from the object store for now"
                self._log.warning(text, url=self.store.url, problem=self.prefix.sweep_problem)
            staged.remove()
            return
        wanted = not self.refused and not flight.cancelled.is_set()
        if self.mesh.rank == 0 and (wanted or refused):
            text = "a checkpoint was not uploaded, and training goes on"
            self._log.error(text, step=staged.step, to=self.store.url, problem=refused or problem)
        if wanted and self.pending is None and staged.attempts < ATTEMPTS:
            self.pending = staged
        else:
            self._leave_out(staged)

    def _begin_next(self) -> None:
        if self.pending is None:
            return
        staged, self.pending = self.pending, None
        staged.attempts += 1
        number = self.mesh.gather(uuid4().hex[:8])[0]
        earlier = self._in_store if staged.attempts == 1 else None  # a copy may have been the problem
        self.flight = Flight(staged, f"step-{staged.step:08d}-{number}", self.store, earlier)
        self.flight.upload()

    def _leave_out(self, staged: Staged) -> None:
        self.left_out += 1
        staged.remove()

    def abandon(self) -> None:
        """Cancel the upload in progress, and discard the checkpoint that waits."""
        for flight in (self.flight, self.pending):
            if isinstance(flight, Flight):
                flight.cancelled.set()
                flight.staged.remove()
            elif flight is not None:
                flight.remove()
        self.flight = self.pending = None

    # --- the store is down ----------------------------------------------------------------------

    def _tell_down(self, flight: Flight) -> None:
        self._down_since = time.monotonic()
        said = self.mesh.gather(flight.trouble)
        if self.mesh.rank == 0:
            problem = next((f"rank {rank}: {text}" for rank, text in enumerate(said) if text), "it is slow")
            text = "the object store takes no uploads; they are tried again, and training goes on"
            self._log.warning(text, url=self.store.url, step=flight.staged.step, problem=problem)

    def _tell_up(self) -> None:
        if self._down_since is None:
            return
        seconds, self._down_since = time.monotonic() - self._down_since, None
        if self.mesh.rank == 0:
            text = "the object store takes uploads again"
            self._log.warning(text, url=self.store.url, seconds=round(seconds, 1))
