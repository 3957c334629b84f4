"""Fetches the newest complete checkpoint of the store to the disk, before a run looks for its checkpoints.

All ranks take part: the files to compare or to fetch are divided among them.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from uuid import uuid4

import attrs
import structlog

from nanotrain_core.api import (
    CheckpointError,
    NanotrainError,
    quarantine_checkpoint,
    show_progress,
    write_text_atomically,
)
from nanotrain_core.api.torch import Restore
from nanotrain_object_store.agree import agree
from nanotrain_object_store.catalogue import look, read_markers
from nanotrain_object_store.fetch import NotFetched, compare, fetch, put_in_place, share_of
from nanotrain_object_store.owner import OthersPrefix, Owner, holds_checkpoints
from nanotrain_object_store.prefix import Prefix
from nanotrain_object_store.store import Store, in_words
from nanotrain_object_store.stored import Stored, find_local

#: File of the run folder with its id.
ID = "object-store-id"
#: Seconds that a start waits for a store that does not answer; none after a failure, with a checkpoint.
PATIENCE = 20.0


@attrs.define
class Found:
    """What rank 0 found in the store."""

    stored: list[Stored] = attrs.field(factory=list)
    """Newest first."""
    down: str = ""
    """Why nothing is known: the store does not answer."""
    refusal: NanotrainError | None = None


def id_of(folder: Path) -> str:
    """Return what tells a run folder from others, made when it is first asked for."""
    path = folder / ID
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, uuid4().hex)
    return path.read_text(encoding="utf-8")[:64]


def ask(store: Store, prefix: Prefix, restore: Restore) -> Found:
    """Take the prefix and list it, on rank 0."""
    log = structlog.get_logger("nanotrain.object_store")
    found, first = Found(), True
    until = time.monotonic() + (0.0 if restore.restarted and restore.steps() else PATIENCE)
    while first or time.monotonic() < until:
        first = False
        try:
            prefix.claim()
            every = read_markers(store, look(store), lambda problem: _skip(log, store, problem))
            found.stored = [stored for stored in every if not prefix.left.leaves(stored.step)]
            found.down = ""
            break
        except NanotrainError as refusal:
            found.refusal = refusal
            return found
        except PermissionError as problem:
            found.refusal = NanotrainError(f"{store.url} cannot be used: {in_words(problem)}")
            return found
        except FileNotFoundError as problem:  # no bucket
            found.refusal = NanotrainError(f"{store.url} is in no store: {in_words(problem)}")
            return found
        except Exception as problem:
            found.down = in_words(problem)
            time.sleep(0.5)
    found.refusal = _refusal(store, restore, found)
    return found


def _skip(log: structlog.stdlib.BoundLogger, store: Store, problem: str) -> None:
    log.warning("ignoring an entry that is not a checkpoint", store=store.url, problem=problem)


def _refusal(store: Store, restore: Restore, found: Found) -> NanotrainError | None:
    """Return why the run cannot begin, or go on, with what is there."""
    others = [each for each in found.stored if each.run != restore.name]
    if others:
        return OthersPrefix(
            f"{store.url} holds checkpoints of run '{others[0].run}', such as {others[0].entry}; expected "
            f"those of run '{restore.name}' alone: name another prefix"
        )
    if restore.which is None and found.stored:
        return holds_checkpoints(store, (each.step for each in found.stored))
    if found.down and restore.which is not None and not restore.steps():
        return CheckpointError(
            f"there is no checkpoint in {restore.folder}, and {store.url} does not answer ({found.down}): "
            "nothing begins anew in the place of what may be there"
        )
    return None


def is_elsewhere(which: str) -> bool:
    """Return whether a run resumes from a path, and not from a checkpoint of its own."""
    return not (which in ("latest", "auto") or which.isdecimal())


@attrs.define(frozen=True)
class Brought:
    """What is known of the disk's checkpoint once the store's was looked at."""

    later: bool = False
    """Whether they are still to be compared."""
    diverged: int | None = None
    """The step of one that is intact and another than the store's."""


def bring(store: Store, found: Sequence[Stored], restore: Restore, *, comparing: bool = True) -> Brought:
    """Fetch the checkpoint that the run will look for, unless the disk has it or a newer one. Collective.

    If the disk's is another than the store's and intact, the run has been there again without the store:
    the disk has its branch.

    Args:
        store: where it is.
        found: what is there, newest first.
        restore: the run.
        comparing: whether one that the disk has is compared, and fetched anew if it is damaged.

    An older one takes the place of one that is damaged in the store, or gone, and of no other: the run would
    leave the newer one's branch.

    Raises:
        NotFetched: on all ranks: it cannot be fetched for the moment.
        CheckpointError: on all ranks: it is damaged in the store, and the disk has no checkpoint.
    """
    which, mesh = restore.which, restore.mesh
    if which is None or is_elsewhere(which):
        return Brought()
    here: list[int] = mesh.gather([*restore.steps()] if mesh.rank == 0 else [])[0]
    wanted = [each for each in found if not which.isdecimal() or each.step == int(which)]
    problems: list[str] = []
    for stored in wanted:
        if stored.step < max(here, default=-1) and not which.isdecimal():
            return Brought()  # the disk has a newer one
        damage = ""
        if stored.step in here:
            if not comparing:
                return Brought(later=True)
            damage = agree(partial(_compare, stored, restore), restore)
            if not damage:
                return Brought()
            if not agree(partial(_verify, stored.step, restore), restore):
                _tell_diverged(store, stored, restore)
                return Brought(diverged=stored.step)
        problem = _fetch(store, stored, restore, instead=damage)
        if not problem:
            return Brought()
        problems.append(problem)
        if mesh.rank == 0:
            log = structlog.get_logger("nanotrain.object_store")
            log.warning("a checkpoint could not be fetched", step=stored.step, problem=problem)
    if problems and not here:
        raise CheckpointError(f"no checkpoint of {store.url} could be fetched whole: {problems[0]}")
    return Brought()


def _compare(stored: Stored, restore: Restore, alive: Callable[[], None]) -> str:
    path = find_local(restore.folder, stored.step)
    if path is None or path.is_dir() != stored.folder:
        return ""  # of another format: the one that loads will say so
    return compare(path, stored, share_of(stored, restore.mesh.rank, restore.mesh.world_size), alive)


def _verify(step: int, restore: Restore, alive: Callable[[], None]) -> str:
    problems = restore.verify(step) if restore.mesh.rank == 0 else ()
    alive()
    return "; ".join(problems)


def _tell_diverged(store: Store, stored: Stored, restore: Restore) -> None:
    if restore.mesh.rank == 0:
        text = "the checkpoint on the disk is intact and another than the store's, of a branch that was left"
        here, there = str(find_local(restore.folder, stored.step)), f"{store.url}/{stored.entry}"
        log = structlog.get_logger("nanotrain.object_store")
        log.warning(f"{text}: the disk's is kept, and uploaded in its place", disk=here, store=there)


@show_progress("fetching a checkpoint from the object store")
def _fetch(store: Store, stored: Stored, restore: Restore, *, instead: str) -> str:
    """Fetch a checkpoint, in place of a damaged one on the disk; return on all ranks how it is damaged."""
    mesh, log = restore.mesh, structlog.get_logger("nanotrain.object_store")
    name = mesh.gather(f".tmp-fetch-{stored.step:08d}-{uuid4().hex[:8]}")[0]
    scratch, damage = restore.folder / name, ""

    def download(alive: Callable[[], None]) -> str:
        nonlocal damage
        os.makedirs(scratch, exist_ok=True)
        damage = fetch(store, stored, share_of(stored, mesh.rank, mesh.world_size), scratch, alive=alive)
        return damage

    def place(alive: Callable[[], None]) -> str:
        if mesh.rank:
            return ""
        damaged = find_local(restore.folder, stored.step)
        if damaged is not None:
            now = quarantine_checkpoint(damaged)
            log.warning("a damaged checkpoint was set aside", problem=instead, now=str(now))
        put_in_place(stored, scratch, restore.folder)
        log.info("fetched", step=stored.step, store=store.url, bytes=stored.nbytes)
        return ""

    problem = agree(download, restore) or agree(place, restore)
    if problem and mesh.rank == 0:
        shutil.rmtree(scratch, ignore_errors=True)
    if problem and not any(mesh.gather(damage)):
        raise NotFetched(
            f"the checkpoint of step {stored.step} cannot be fetched from {store.url} ({problem}), and the "
            "run does not go on from an older one: run again with --resume once it can"
        )
    return problem


def owner_of(restore: Restore) -> Owner:
    """Return who this run says that it is."""
    return Owner(run=restore.name, id=id_of(restore.folder.parent))
