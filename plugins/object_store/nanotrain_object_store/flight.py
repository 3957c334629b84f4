"""One checkpoint on its way to the store: this rank's files, in a thread, tried until they are there.

Ranks learn of one another at step boundaries (:mod:`nanotrain_object_store.uploads`). First each uploads its
files; when all have, rank 0 completes the checkpoint with its marker, in a thread too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import attrs

from nanotrain_core.api import NanotrainError
from nanotrain_object_store.prefix import Prefix
from nanotrain_object_store.staged import Staged
from nanotrain_object_store.store import Store, in_words
from nanotrain_object_store.stored import Sent, Stored, hashed, is_plain

T = TypeVar("T")

#: Seconds between tries: the first, then twice as many each time, up to the last. Clients have tried
#: several times by then.
FIRST, LAST = 0.5, 20.0


#: What tells whether a file is one that was uploaded before: device, inode, bytes, time of its last change.
FileId = tuple[int, int, int, int]


@attrs.define(frozen=True)
class InStore:
    """A file of this rank that is in the store."""

    key: str
    sent: Sent


class Cancelled(Exception):
    """The upload is not wanted any more."""


class Flight:
    """An upload that was begun."""

    def __init__(
        self, staged: Staged, entry: str, store: Store, earlier: Mapping[FileId, InStore] | None = None
    ) -> None:
        """``earlier``: files of an earlier checkpoint that need not be sent again."""
        self.staged, self.entry, self.store, self.earlier = staged, entry, store, earlier or {}
        self.sent: dict[str, Sent] = {}
        self.in_store: dict[FileId, InStore] = {}
        """This rank's files, once they are there."""
        self.problem = ""
        """Why it failed for good; errors that another try may resolve are in :attr:`trouble`."""
        self.trouble = ""
        """Why the store does not accept it at present."""
        self.completing = False
        """Whether all ranks' files are there, and the marker is next."""
        self.cancelled = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether this rank is still at it."""
        return self._thread is not None and self._thread.is_alive()

    def upload(self) -> None:
        """Begin with this rank's files."""
        self._begin(self._upload)

    def complete(self, prefix: Prefix, run: str, files: Mapping[str, Sent]) -> None:
        """Begin to complete it, on rank 0: the files of all ranks are there."""
        staged = self.staged
        name, folder = staged.path.name, staged.folder
        stored = Stored(entry=self.entry, step=staged.step, run=run, name=name, folder=folder, files=files)

        def publish() -> None:
            self.problem = self._try(lambda: prefix.publish(stored, self.cancelled.is_set))
            if not self.problem and staged.retention is not None:
                prefix.sweep(self.entry, staged.retention)

        self._begin(publish)

    def _upload(self) -> None:
        for name, path in self.staged.files.items():
            if not is_plain(name):
                raise ValueError(f"{name!r} is no name that a store's checkpoints may have")
            within = f"{self.staged.path.name}/{name}" if self.staged.folder else name
            id_ = file_id(path)
            self.in_store[id_] = self._send(path, f"{self.entry}/{within}", self.earlier.get(id_))
            self.sent[name] = self.in_store[id_].sent

    def _send(self, path: Path, key: str, earlier: InStore | None) -> InStore:
        """Have the store copy what it has, as frozen weights that checkpoints share; upload all else."""
        if earlier is not None and self._copied(earlier.key, key):
            return attrs.evolve(earlier, key=key)
        sent = hashed(path)
        self._try(lambda: self.store.put(path, key))
        return InStore(key, sent)

    def _copied(self, source: str, key: str) -> bool:
        """Return whether the store has copied an object: it may be gone, or the store may have no copies."""
        if self.cancelled.is_set():
            raise Cancelled
        try:
            self.store.copy(source, key)
        except Exception:
            return False
        return True

    def _begin(self, act: Callable[[], None]) -> None:
        def work() -> None:
            try:
                act()
            except Cancelled:
                self.problem = "it was broken off"
            except Exception as problem:
                self.problem = in_words(problem)

        self._thread = threading.Thread(target=work, name="object-store-upload", daemon=True)
        self._thread.start()

    def _try(self, act: Callable[[], T]) -> T:
        """Do ``act`` until the store lets it."""
        delay = FIRST
        while True:
            if self.cancelled.is_set():
                raise Cancelled
            try:
                done = act()
                self.trouble = ""
                return done
            except (NanotrainError, FileNotFoundError) as problem:
                if isinstance(problem, NanotrainError) or not all(
                    path.exists() for path in self.staged.files.values()
                ):
                    raise  # the prefix is another run's; or what was to be uploaded is gone
                self.trouble = in_words(problem)
            except Exception as problem:
                self.trouble = in_words(problem)
            self.cancelled.wait(delay)
            delay = min(2 * delay, LAST)


def file_id(path: Path) -> FileId:
    """Return what tells a file from others, and from what was in it before it was written to."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
