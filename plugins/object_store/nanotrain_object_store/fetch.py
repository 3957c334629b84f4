"""Checkpoints from the store to the disk, compared with their markers byte for byte. Torch-free."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from nanotrain_core.api import CheckpointError, Exit, flush
from nanotrain_object_store.store import Store, in_words
from nanotrain_object_store.stored import Sent, Stored, hashed

#: Times that a file is asked for, and the first wait between them, in seconds, doubled each time.
TRIES, FIRST = 5, 0.5
#: Times that it may come as another than was uploaded: on the way, or it is so in the store.
OTHERS = 2


class NotFetched(CheckpointError):
    """A checkpoint cannot be fetched for the moment: nothing says that it is damaged."""

    exit_code = Exit.FAILED
    restart_helps = True


def share_of(stored: Stored, rank: int, ranks: int) -> list[str]:
    """Return which files are one rank's to fetch or to compare: of all ranks about as many bytes."""
    loads = [0] * ranks
    mine = []
    for name, file in sorted(stored.files.items(), key=lambda item: (-item[1].bytes, item[0])):
        least = min(range(ranks), key=loads.__getitem__)
        loads[least] += file.bytes + 1
        if least == rank:
            mine.append(name)
    return mine


def fetch(
    store: Store,
    stored: Stored,
    names: Iterable[str],
    scratch: Path,
    advance: Callable[[float], object] = lambda more: None,
    alive: Callable[[], object] = lambda: None,
) -> str:
    """Fetch files of a checkpoint into a folder; return what is wrong with the first that is damaged or gone.

    Args:
        store: where it is.
        stored: its marker.
        names: of its files.
        scratch: the folder.
        advance: called with the bytes of each file.
        alive: called after each piece of a file.

    Raises:
        NotFetched: no file is damaged, and one could not be fetched in several attempts.
        OSError: the disk does not take it.
    """
    for name in names:
        target = scratch / name
        target.parent.mkdir(parents=True, exist_ok=True)
        problem = _fetch_one(store, stored.key(name), stored.files[name], target, alive)
        if problem:
            return problem
        advance(stored.files[name].bytes)
    return ""


def _fetch_one(store: Store, key: str, expected: Sent, target: Path, alive: Callable[[], object]) -> str:
    problem, others = "", 0
    for number in range(TRIES):
        if number:
            time.sleep(FIRST * 2 ** (number - 1))
        try:
            store.get(key, target, alive)
            problem = difference(hashed(target, alive), expected)
            if not problem:
                flush(target)
                return ""
            others += 1
            if others == OTHERS:
                return f"{store.url}/{key}: {problem}"
        except FileNotFoundError:
            return f"{store.url}/{key} is not there any more"
        except Exception as error:
            problem = in_words(error)
    raise NotFetched(f"{store.url}/{key}: {problem}")


def difference(found: Sent, expected: Sent) -> str:
    """Return how a file differs from what its marker says; empty if it does not."""
    if found.bytes != expected.bytes:
        return f"it has {found.bytes} bytes, expected {expected.bytes}"
    return "" if found == expected else "its SHA-256 is another than when it was uploaded"


def compare(path: Path, stored: Stored, names: Iterable[str], alive: Callable[[], object]) -> str:
    """Compare files on the disk with the marker; return what is wrong with the first that differs.

    ``alive`` is called after each piece of a file.
    """
    for name in names:
        file = path / name if stored.folder else path
        try:
            if file.is_symlink():
                return f"{file} is a symbolic link"
            problem = difference(hashed(file, alive), stored.files[name])
        except OSError as error:
            problem = str(error.strerror or error)
        if problem:
            return f"{file}: {problem}"
    return ""


def put_in_place(stored: Stored, scratch: Path, folder: Path) -> Path:
    """Rename what was fetched into ``scratch`` to what the run looks for; return where it is.

    Raises:
        OSError: it cannot be, or a file is not there: ranks do not see one folder.
    """
    for name in stored.files:
        if not (scratch / name).is_file():
            raise FileNotFoundError(
                f"{scratch / name} was fetched by another rank, and is not seen by rank 0: all ranks must "
                "see one run folder"
            )
    target = folder / stored.name
    if os.path.lexists(target):
        raise FileExistsError(f"{target} is there already")
    if stored.folder:
        scratch.rename(target)
    else:
        (scratch / stored.name).rename(target)
        scratch.rmdir()
    flush(folder)
    return target
