"""Shards on a disk of this host, fetched when they are asked for, within a budget that its ranks share.

Files are named by the SHA-256 of the shard's tokens, so that runs and sources share what is equal. A lock for
each shard lets one process fetch it while the others wait, and another lock guards the room that is left:
where a shard is being fetched, a file as long as it (sparse) stands for it. Nothing is kept open: a shard
that another rank deleted for want of room is fetched again, and its room is free at once.

On a file system without locks each rank fetches for itself, to files of its own. Then the cache may hold more
than its budget for a moment.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from nanotrain_core.api import DataError
from nanotrain_data.manifest import ShardInfo
from nanotrain_data.remote import RemoteFolder

#: What a shard's files are called after its hash. The first is put in place last.
TOKENS, HASHES, FETCHED, RESERVED = ".tokens", ".hashes", ".part", ".reserved"
#: Seconds after which a fetch to which nothing has come is over, where no lock tells.
ABANDONED = 600.0


class ShardCache:
    """A folder of shards."""

    def __init__(self, folder: Path, size: int) -> None:
        """Use a folder, made if it is not there.

        Args:
            folder: of this host.
            size: bytes that its files may have in all.

        Raises:
            DataError: it cannot be written to.
        """
        self.folder, self.size = folder, size
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".lock").touch()
        except OSError as error:
            raise DataError(
                f"cannot write to the cache {folder}: {error.strerror}; data.cache names it"
            ) from None

    def path(self, shard: ShardInfo) -> Path:
        """Return where the tokens of a shard are, if they are there; hashes are beside."""
        return self.folder / f"{shard.sha256}{TOKENS}"

    def fetch(self, source: RemoteFolder, shard: ShardInfo, nbytes: int) -> Path:
        """Return the file of a shard's tokens, after fetching it where it is not there.

        It may be deleted at any time, for another: whoever opens it does it again then.

        Args:
            source: where it comes from.
            shard: of it.
            nbytes: of its tokens.

        Raises:
            DataError: it cannot be fetched, or the cache holds not even this shard.
        """
        path = self.path(shard)
        if _is_whole(path, nbytes):
            return path
        with _locked(path.with_suffix(".lock")):
            if _is_whole(path, nbytes):
                return path  # which another rank fetched meanwhile
            path.unlink(missing_ok=True)
            part = path.with_suffix(f".{uuid4().hex}{FETCHED}")
            reserved, hashes = part.with_suffix(RESERVED), path.with_suffix(HASHES)
            try:
                self._make_room(reserved, nbytes)
                source.fetch(f"{shard.name}{HASHES}", part, shard.hashes_sha256)
                part.replace(hashes)
                source.fetch(f"{shard.name}{TOKENS}", part, shard.sha256)
                with _locked(self.folder / ".lock"):  # who counts sees one of the two, or the other
                    part.replace(path)
                    reserved.unlink(missing_ok=True)
            except OSError as error:
                raise DataError(
                    f"cannot write to the cache {self.folder}: {error.strerror or error}"
                ) from None
            finally:
                for file in (part, reserved):
                    file.unlink(missing_ok=True)
        return path

    def _make_room(self, reserved: Path, nbytes: int) -> None:
        """Delete what was read longest ago until ``nbytes`` fit, and reserve them by a file."""
        if nbytes > self.size:
            raise DataError(
                f"the cache {self.folder} may hold {self.size / 1e9:g} GB, and one shard has "
                f"{nbytes / 1e9:g}: raise data.cache_gb, or prepare smaller shards (--shard-mb)"
            )
        while True:
            with _locked(self.folder / ".lock"):
                found = [*self._files()]
                free = self.size - sum(size for _, _, size in found)
                for _, old, size in sorted(entry for entry in found if entry[1].suffix == TOKENS):
                    if free >= nbytes:
                        break
                    for suffix in (TOKENS, HASHES):
                        old.with_suffix(suffix).unlink(missing_ok=True)
                    free += size
                if free >= nbytes:
                    with reserved.open("wb") as file:
                        file.truncate(nbytes)
                    return
            self._forget_the_dead()
            time.sleep(0.05)  # others are fetching: what they fetch can be deleted once it is there

    def _files(self) -> Iterator[tuple[float, Path, int]]:
        """Yield when each shard was read last, its file or what stands for it, and its bytes."""
        for path in self.folder.iterdir():
            if path.suffix in (TOKENS, RESERVED):
                with suppress(FileNotFoundError):
                    known = path.stat()
                    yield known.st_mtime, path, known.st_size

    def _forget_the_dead(self) -> None:
        """Give up reservations of processes that were killed: nobody holds their locks."""
        for path in self.folder.glob(f"*{RESERVED}"):
            with (self.folder / f"{path.name.partition('.')[0]}.lock").open("w") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                except OSError:  # a file system without locks
                    if not _is_abandoned(path):
                        continue
                for suffix in (FETCHED, RESERVED):
                    path.with_suffix(suffix).unlink(missing_ok=True)


def _is_abandoned(reserved: Path) -> bool:
    """Return whether nothing has been fetched for a reservation for long."""
    newest = 0.0
    for file in (reserved, reserved.with_suffix(FETCHED)):
        with suppress(FileNotFoundError):
            newest = max(newest, file.stat().st_mtime)
    return time.time() - newest > ABANDONED


def _is_whole(path: Path, nbytes: int) -> bool:
    """Return whether both files are there, and note that they are read: what was read last is deleted last.

    A host that loses power may leave a file cut short, whose pieces all match their hashes as far as it goes.
    What cleans a cache of old files may delete one of the two: it goes by these times as well.
    """
    try:
        for file in (path.with_suffix(HASHES), path):
            os.utime(file)
        return path.stat().st_size == nbytes
    except FileNotFoundError:
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        with suppress(OSError):  # a file system without locks: each rank fetches for itself
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
