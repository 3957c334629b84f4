"""The monitor ``memory_snapshots``: keeps each step's state, and restores it after a restart."""

from __future__ import annotations

import contextlib
import shutil
import socket
import uuid
from collections.abc import Callable, Mapping
from typing import IO, Any

import structlog
import torch

from nanotrain_core.api import NanotrainError
from nanotrain_core.api.torch import (
    EndReport,
    Mesh,
    Monitor,
    Restore,
    RunInfo,
    StepEnd,
    StepReport,
    TrainState,
    UpdateReport,
)
from nanotrain_memory_snapshots import MemorySnapshotsConfig, places, ring
from nanotrain_memory_snapshots.payload import Form
from nanotrain_memory_snapshots.recovery import Found, Seen, go_back, look
from nanotrain_memory_snapshots.seal import Moment
from nanotrain_memory_snapshots.slot import HEAD, OTHER, OWN, Slot
from nanotrain_memory_snapshots.space import missing
from nanotrain_memory_snapshots.writing import Places, Writing

#: Advice if there is not enough memory.
ADVICE = "give hosts a larger one, name another in `folder`, set `neighbor = false`, or leave the monitor out"
log = structlog.get_logger("nanotrain.memory_snapshots")


class MemorySnapshots(Monitor):
    """See the README. Does nothing in a run that no launcher would restart."""

    reads_weights = False

    def __init__(self, config: MemorySnapshotsConfig) -> None:
        self.config = config
        self.restore: Restore | None = None
        self.found: Found | None = None
        self.places: Places | None = None
        self.writing: Writing | None = None
        self.group: Any = None
        self.lock: IO[str] | None = None
        """Held while this rank has its folder."""
        self.blocked, self.rollbacks = 0.0, 0
        self.seconds: float | None = None
        self.problems: list[str] = []
        """Not reported yet."""
        self._told: set[str] = set()

    # --- before the search for a checkpoint -----------------------------------------------------

    def on_before_restore(self, restore: Restore) -> None:
        """Find this run's snapshots; delete those of earlier starts."""
        self.restore = self.found = None
        mesh, run_folder = restore.mesh, restore.folder.parent
        if not (restore.may_restart or restore.restarted):
            if mesh.rank == 0:
                text = "no memory snapshots are kept: nobody would start the ranks again (run.max_restarts)"
                log.info(text)
            return
        self.restore, now = restore, restore.identity()
        old = mesh.gather(places.read_identity(run_folder) if mesh.rank == 0 else None)[0]
        changed = sorted({word for each in mesh.gather(_changes(old, now)) for word in each})
        machines: list[str] = mesh.gather(socket.gethostname())
        first_here = machines.index(machines[mesh.rank]) == mesh.rank
        useless = old if changed or not restore.restarted else None
        held = useless is not None and first_here and places.forget(useless, self.config.folder)
        if any(mesh.gather(held)) and mesh.rank == 0:
            text = "the run folder is a copy of a live run's, whose memory snapshots are left to it"
            log.warning(text, folder=str(run_folder))
        if restore.restarted and mesh.rank == 0 and (changed or old is None):
            why = f"changed: {', '.join(changed)}" if changed else "nobody knows where they are"
            _fall_back(why)
        new = places.new_identity(now) if old is None or changed or not restore.restarted else old
        self.identity: places.Identity = mesh.gather(new)[0]
        if mesh.rank == 0 and self.identity != old:
            places.write_identity(run_folder, self.identity)
        self.is_old = self.identity == old
        self.folder = places.folder_of(mesh.rank, self.identity, self.config.folder)
        self.lock = places.hold(self.folder)  # of snapshots that will be restored
        self.seen = look(self.identity, self.config.folder) if self.is_old else Seen()
        if mesh.world_size > 1 and self.group is None:
            self.group = ring.make_group(mesh.timeout)

    def on_recover(self, restore: Restore, at_least: int) -> TrainState | None:
        """Fill the run's state from the newest snapshot that is intact on every rank."""
        if self.restore is None or not self.is_old:
            return None
        self.found, damaged = go_back(self.seen, restore.state(), restore.mesh, at_least, self.group)
        if restore.mesh.rank == 0:
            for problem in damaged:
                log.warning("a memory snapshot is damaged", problem=problem)
            if self.found is None:
                why = f"no snapshot as new as the checkpoint, of step {at_least}, is complete on all ranks"
                _fall_back(why)
            else:
                lost, copies = self.found.steps_lost, self.found.from_copies
                step = self.found.moment.step
                log.info("restored from memory", step=step, steps_lost=lost, from_neighbors=copies)
        return None if self.found is None else self.found.state

    # --- the run ----------------------------------------------------------------------------------

    def on_start(self, run: RunInfo) -> None:
        """Reserve memory for snapshots, or fail the run."""
        self.run, self.seconds = run, None
        if self.restore is None:
            return
        mesh = run.mesh
        hosts: list[str] = mesh.gather(ring.host())
        further = ring.distance(hosts) if self.config.neighbor and mesh.world_size > 1 else 0
        to, source = ((mesh.rank + sign * further) % mesh.world_size for sign in (1, -1))
        _agree(mesh, lambda: places.make_folder(self.folder))
        self.lock = self.lock or places.hold(self.folder)
        self.restore.delete_at_end(self.folder)
        self._delete_others(mesh.gather(socket.gethostname()))
        sizes: list[int] = mesh.gather(Form.of(self.restore.state()).nbytes)
        count = self.config.keep + 1
        own, others = ([Slot(self.folder, f"{name}-{n}") for n in range(count)] for name in (OWN, OTHER))
        rooms = [(slot, sizes[mesh.rank]) for slot in own]
        rooms += [(slot, sizes[source]) for slot in others if further]
        wanted = mesh.gather((socket.gethostname(), sum(HEAD + size - slot.nbytes() for slot, size in rooms)))
        _agree(mesh, lambda: self._make_room(rooms, wanted))
        self.life: str = mesh.gather(uuid.uuid4().hex)[0]
        if further and hosts[to] == hosts[mesh.rank] and len(set(hosts)) > 1:
            log.warning("the neighbor with this rank's memory snapshots is on the same host", neighbor=to)
        # Last: from here on each rank waits for its neighbor's messages.
        self.places = Places(mesh.rank, own, others, self.group if further else None, to, source)
        self.rollbacks = self.found.moment.rollbacks if self.found is not None else 0
        if self.found is not None and run.rank == 0:
            run.metrics.scalar("recovery/steps_lost", float(self.found.steps_lost))
            run.metrics.scalar("recovery/from_neighbors", float(self.found.from_copies))

    def _delete_others(self, machines: list[str]) -> None:
        """Keep only the restored snapshots on this host: later nothing else may be mistaken for them."""
        assert self.restore is not None
        mine = [rank for rank, machine in enumerate(machines) if machine == socket.gethostname()]
        if self.run.rank == mine[0]:
            for rank, folder in places.folders_here(self.identity, self.config.folder):
                if rank not in mine:
                    shutil.rmtree(folder, ignore_errors=True)
        moment = self.found.moment if self.found is not None else None
        for path in self.folder.glob("*.bin"):
            slot = Slot(self.folder, path.stem)
            if slot.moment is None or slot.moment != moment:
                slot.clear()

    def _make_room(self, rooms: list[tuple[Slot, int]], wanted: list[tuple[str, int]]) -> None:
        """Reserve memory for this many bytes in each slot, if the host has enough for all its ranks.

        Raises:
            NanotrainError: it does not.
        """
        machine = socket.gethostname()
        total = sum(more for where, more in wanted if where == machine)
        if problem := missing(self.folder, total):
            text = f"memory snapshots need {total / 1e9:.3g} GB on {machine}, and {problem}: {ADVICE}"
            raise NanotrainError(text)
        try:
            for slot, nbytes in rooms:
                slot.reserve(nbytes)
        except OSError as error:
            text = f"memory snapshots cannot have their memory in {self.folder}: {error.strerror}; {ADVICE}"
            raise NanotrainError(text) from None

    def on_step_end(self, end: StepEnd) -> None:
        """Begin a snapshot."""
        self.rollbacks = end.rollbacks
        if self.places is None or end.step % self.config.every:
            return
        self._finish()
        self._tell()
        self.writing = Writing(self.places, end.state(), Moment(end.rollbacks, end.step, self.life))

    def on_before_update(self, update: UpdateReport) -> None:
        """Wait until the snapshot is complete before the update modifies the weights."""
        self._finish()

    def on_after_update(self, update: UpdateReport) -> None:
        """Record that the step is done: a rollback to a snapshot reports how many steps were lost."""
        if self.places is not None:
            self.places.own[0].note_reached(self.rollbacks, update.step)

    def _finish(self) -> None:
        writing, self.writing = self.writing, None
        if writing is None or self.restore is None:
            return
        self.blocked, self.seconds = writing.join(), writing.seconds
        self.problems += filter(None, (writing.problem, writing.broken))
        if not (writing.problem or writing.broken):
            self.restore.recoverable(writing.moment.step)

    def _tell(self) -> None:
        """Report a problem once, a step later: if ranks are gone, the run ends for that reason by then."""
        for problem in self.problems:
            if problem not in self._told:
                self._told.add(problem)
                log.warning("a memory snapshot failed", problem=problem)
        self.problems.clear()

    def on_step(self, report: StepReport) -> None:
        """Publish the cost."""
        if self.seconds is not None:
            self.run.metrics.scalar("snapshots/seconds", self.seconds)
            self.run.metrics.scalar("snapshots/blocked", self.blocked)

    def on_end(self, report: EndReport) -> None:
        """Delete snapshots that no restart will need; after a failure the ranks may be restarted."""
        if self.lock is not None:
            self.lock.close()
        if self.restore is None or self.places is None:
            return
        if report.reason == "failed":
            self._send_none(self.places)
        if self.writing is not None and report.reason != "failed":
            self.writing.join()
        if report.reason != "failed":
            shutil.rmtree(self.folder, ignore_errors=True)
            if self.run.rank == 0:
                (self.restore.folder.parent / places.FILE).unlink(missing_ok=True)

    def _send_none(self, places: Places) -> None:
        """Let the neighbor not wait for a snapshot of a step that this rank has not finished.

        If this rank keeps its process, no connection is closed as long as a thread waits in the group.
        """
        with contextlib.suppress(RuntimeError):  # the neighbor is gone
            if places.group is not None:
                self.sent = ring.send(places.group, places.to, b"", torch.empty(0))


def _changes(old: places.Identity | None, now: Mapping[str, str]) -> list[str]:
    return [] if old is None else old.differences(now)


def _agree(mesh: Mesh, act: Callable[[], object]) -> None:
    """Call ``act`` on every rank; raise on all ranks the error of the first rank with a problem.

    Raises:
        NanotrainError: naming the rank.
    """
    said = ""
    try:
        act()
    except NanotrainError as problem:
        said = str(problem)
    for text in mesh.gather(said):
        if text:
            raise NanotrainError(text)


def _fall_back(why: str) -> None:
    log.warning("restored from the checkpoint, not from memory", why=why)
