"""Which checkpoints a prefix has, and which of them go. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs

from nanotrain_core.api import CheckpointError, newest_evaluated
from nanotrain_object_store.store import Store, in_words
from nanotrain_object_store.stored import LARGEST, LEFT, MARKER, Stored, entry_of, parse, step_of


@attrs.define(frozen=True)
class Listing:
    """What is in a prefix."""

    objects: dict[str, dict[str, int]]
    """Folder of a checkpoint -> name of its objects -> bytes; complete or not."""

    def complete(self) -> list[str]:
        """Return the folders with a marker, by step; not those of an abandoned branch."""
        objects = self.objects.items()
        found = (e for e, names in objects if f"{e}/{MARKER}" in names and f"{e}/{LEFT}" not in names)
        return sorted(found, key=step_of)


def look(store: Store) -> Listing:
    """List the prefix. What is called otherwise than a checkpoint is left out, and left alone."""
    found: dict[str, dict[str, int]] = {}
    for name, size in store.sizes().items():
        if entry := entry_of(name):
            found.setdefault(entry, {})[name] = size
    return Listing(found)


def read_markers(
    store: Store, listing: Listing, tell: Callable[[str], None] = lambda problem: None
) -> list[Stored]:
    """Return the checkpoints, newest first; of markers that cannot be ``tell`` gets a sentence each."""
    found = []
    for entry in reversed(listing.complete()):
        try:
            data = store.read(f"{entry}/{MARKER}", most=LARGEST)
            if data is not None:
                found.append(parse(data, entry))
        except CheckpointError as problem:
            tell(str(problem))
    return found


def missing(stored: Stored, objects: dict[str, int]) -> list[str]:
    """Return what is wrong with the objects of a checkpoint, as far as a listing tells."""
    problems = []
    for name, file in stored.files.items():
        size = objects.get(stored.key(name))
        if size is None:
            problems.append(f"{stored.key(name)} is not in the store")
        elif size != file.bytes:
            problems.append(f"{stored.key(name)} has {size} bytes, expected {file.bytes}")
    return problems


def supersede(store: Store, after: int) -> str:
    """Take checkpoints of later steps than ``after``, of a branch that the run has left, out of the listing.

    Their markers are renamed: nothing resumes from them, and their files stay until :func:`expendable`. All
    new names are written first: they are enough in a store that denies deletes.

    Returns:
        Why the old names could not be deleted; empty if they were.
    """
    left = [entry for entry in look(store).complete() if step_of(entry) > after]
    for entry in left:
        data = store.read(f"{entry}/{MARKER}", most=LARGEST)
        store.put_bytes(f"{entry}/{LEFT}", data or b"")
    try:
        store.delete([f"{entry}/{MARKER}" for entry in left])
    except Exception as problem:
        return in_words(problem)
    return ""


def expendable(listing: Listing, *, keep: int, newest: str, retention: Mapping[str, int | None]) -> list[str]:
    """Return the folders that retention may delete once ``newest`` is complete.

    Those are complete checkpoints except the ``keep`` newest and those that the disk keeps for ``retention``
    (before the last finite evaluation, and before the steps that a monitor may still roll back), earlier
    uploads of a step that has a later one, remains of interrupted uploads, and checkpoints abandoned by a
    rollback, once the run has reached their steps again.
    """
    complete = listing.complete()
    stay = newest_evaluated([*map(step_of, complete)], retention)
    kept = {newest}
    for entry in reversed(complete):
        other = any(step_of(entry) == step_of(each) for each in kept)
        wanted = len({step_of(each) for each in kept}) < keep or step_of(entry) in stay
        if not other and wanted and step_of(entry) <= step_of(newest):
            kept.add(entry)
    ahead = {
        entry
        for entry, names in listing.objects.items()
        if step_of(entry) > step_of(newest) and (f"{entry}/{LEFT}" in names or entry in complete)
    }
    return sorted(listing.objects.keys() - kept - ahead)


def remove(store: Store, listing: Listing, entries: Sequence[str]) -> str:
    """Delete checkpoints, each one's marker first: half of one is none. Return what went wrong."""
    for entry in entries:
        names = [*listing.objects[entry]]
        marker = f"{entry}/{MARKER}"
        try:
            store.delete([marker] if marker in names else [])
            store.delete([name for name in names if name != marker])
        except Exception as problem:
            return in_words(problem)
    return ""
