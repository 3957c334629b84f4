"""Restarted ranks agree on the newest moment that all of them can restore, and restore it.

A moment is usable if every rank's snapshot of it is intact somewhere: in its own folder, at its neighbor, or
left on a host by ranks with other numbers.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from nanotrain_core.api.torch import Mesh, TrainState
from nanotrain_memory_snapshots import ring
from nanotrain_memory_snapshots.payload import Form
from nanotrain_memory_snapshots.places import Identity, folders_here
from nanotrain_memory_snapshots.seal import Moment
from nanotrain_memory_snapshots.slot import OTHER, Slot


@attrs.define(frozen=True)
class Held:
    """A sealed snapshot that a rank sees."""

    of: int
    """The rank whose state it is."""
    moment: Moment
    machine: str
    folder: Path
    name: str
    """Name of its slot."""
    form: int
    nbytes: int

    @property
    def slot(self) -> Slot:
        return Slot(self.folder, self.name)

    @property
    def is_copy(self) -> bool:
        """Whether it is kept for another rank."""
        return self.name.startswith(OTHER)

    @property
    def place(self) -> tuple[str, str]:
        """The location, the same for all ranks that see it."""
        return self.machine, str(self.folder / self.name)


@attrs.define(frozen=True)
class Seen:
    """The snapshots that one rank sees on its host."""

    held: Sequence[Held] = ()
    reached: tuple[int, int] = (0, 0)
    """Rollbacks and steps of the run when it ended, as far as this host knows."""


def look(identity: Identity, within: str) -> Seen:
    """Return all snapshots on this host."""
    held, reached = [], [(0, 0)]
    for _, folder in folders_here(identity, within):
        for path in sorted(folder.glob("*.bin")):
            slot = Slot(folder, path.stem)
            reached.append(slot.reached())
            seal = slot.seal()
            if seal is not None:
                place = socket.gethostname(), folder, path.stem
                held.append(Held(seal.rank, seal.moment, *place, seal.form, seal.nbytes))
    return Seen(held, max(reached))


@attrs.define(frozen=True)
class Plan:
    """The reader of each rank's snapshot."""

    moment: Moment
    sources: Sequence[tuple[int, Held]]
    """For each rank: the rank that reads its snapshot, and which."""


def plans(seen: Sequence[Sequence[Held]], at_least: int, bad: set[tuple[str, str]]) -> Iterator[Plan]:
    """Yield the moments that can be restored, newest first, unless ``bad`` makes them incomplete.

    Args:
        seen: by each rank.
        at_least: older steps are not usable.
        bad: locations found to be damaged; may grow during iteration.
    """
    moments = {held.moment for each in seen for held in each if held.moment.step >= at_least}
    for moment in sorted(moments, reverse=True):
        while True:
            sources = [_source(rank, seen, moment, bad) for rank in range(len(seen))]
            whole = [source for source in sources if source is not None]
            if len(whole) < len(seen):
                break
            yield Plan(moment, whole)


def _source(
    rank: int, seen: Sequence[Sequence[Held]], moment: Moment, bad: set[tuple[str, str]]
) -> tuple[int, Held] | None:
    """Return who reads the snapshot of ``rank``: itself if it can, its own before a copy; else the first that
    sees one."""
    for reader in [rank, *(other for other in range(len(seen)) if other != rank)]:
        here = [held for held in seen[reader] if (held.of, held.moment) == (rank, moment)]
        whole = [held for held in here if held.place not in bad]
        if whole:
            return reader, min(whole, key=lambda held: held.is_copy)
    return None


@attrs.define(frozen=True)
class Found:
    """The restored state of all ranks."""

    state: TrainState
    moment: Moment
    steps_lost: int
    from_copies: int
    """Ranks whose own snapshot was missing, and that used their neighbor's copy."""


def go_back(
    seen: Seen, state: TrainState, mesh: Mesh, at_least: int, group: Any
) -> tuple[Found | None, list[str]]:
    """Fill ``state``; return the result, or None, and what was found to be damaged. Collective.

    Nothing is filled before every rank's snapshot was read and verified against its seal.
    """
    everyone: list[Seen] = mesh.gather(seen)
    form, bad, damaged = Form.of(state), set[tuple[str, str]](), list[str]()
    forms: list[tuple[int, int]] = mesh.gather((form.checksum, form.nbytes))
    for plan in plans([each.held for each in everyone], at_least, bad):
        mine = [(of, held) for of, (reader, held) in enumerate(plan.sources) if reader == mesh.rank]
        problems = [(held.place, _problem(held, forms[of])) for of, held in mine]
        found = [each for some in mesh.gather([p for p in problems if p[1]]) for each in some]
        bad.update(place for place, _ in found)
        damaged += [problem for _, problem in found]
        if found:
            continue
        meta, payload = _fetch(plan, mesh, group)
        form.read(payload)
        reached = max(each.reached for each in everyone)
        lost = reached[1] - plan.moment.step if reached[0] == plan.moment.rollbacks else 0
        copies = sum(held.is_copy for _, held in plan.sources)
        state = TrainState(state.blocks, meta, state.rank_tensors)
        return Found(state, plan.moment, max(lost, 0), copies), damaged
    return None, damaged


def _problem(held: Held, form: tuple[int, int]) -> str:
    if (held.form, held.nbytes) != form:
        return f"{held.folder / held.name} has other tensors than rank {held.of} has now"
    return held.slot.damage()


def _fetch(plan: Plan, mesh: Mesh, group: Any) -> tuple[Mapping[str, Any], torch.Tensor]:
    """Obtain this rank's snapshot, and send those that other ranks lack."""
    works = []
    for of, (reader, held) in enumerate(plan.sources):
        if reader == mesh.rank and of != reader:
            payload = held.slot.payload(held.nbytes)
            works.append((dist.isend(payload, of, group=group, tag=ring.BYTES), payload))
    reader, held = plan.sources[mesh.rank]
    metas: list[Mapping[str, Any]] = mesh.gather(_meta(plan, mesh.rank))
    if reader == mesh.rank:
        payload = held.slot.payload(held.nbytes)
    else:
        payload = torch.empty(held.nbytes, dtype=torch.uint8)
        dist.recv(payload, reader, group=group, tag=ring.BYTES)
    ring.wait(works)
    return metas[mesh.rank] or next(meta for meta in metas if meta), payload


def _meta(plan: Plan, rank: int) -> Mapping[str, Any]:
    """Return the snapshot's metadata, which is the same on all ranks."""
    reader, held = plan.sources[rank]
    seal = held.slot.seal() if reader == rank else None
    return {} if seal is None else seal.meta
