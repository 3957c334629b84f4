"""Objects under one prefix of an fsspec file system: put, read, listed, deleted. Torch-free, no retries."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path

from fsspec.callbacks import Callback
from fsspec.core import url_to_fs

#: Protocols of the machine's own disks, which have folders, and want them made and removed.
_DISKS = ("file", "local")


class Store:
    """A prefix. Names are relative to it; methods raise whatever the file system's library does."""

    def __init__(self, url: str, *, part_mib: float = 64.0) -> None:
        """Make the client; nothing is asked yet.

        Args:
            url: as ``s3://bucket/prefix``.
            part_mib: size of parts of multipart uploads.
        """
        self.url = url.rstrip("/")
        self.on_disk = self.url.partition("://")[0] in _DISKS
        options = {"auto_mkdir": True} if self.on_disk else {}
        # What others put there must be seen, and clients of other threads must not be shared.
        self.fs, root = url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True, **options)
        self.root = root.rstrip("/")
        put = inspect.signature(getattr(self.fs, "_put_file", self.fs.put_file))
        self._parts = {"chunksize": int(part_mib * 2**20)} if "chunksize" in put.parameters else {}

    def _at(self, name: str) -> str:
        return f"{self.root}/{name}"

    def put(self, path: Path, name: str) -> None:
        """Upload a file, in parts if it is large."""
        self.fs.put_file(str(path), self._at(name), **self._parts)

    def copy(self, source: str, name: str) -> None:
        """Have the store copy an object: its bytes do not pass through this machine."""
        self.fs.cp_file(self._at(source), self._at(name))

    def put_bytes(self, name: str, data: bytes) -> None:
        """Write a small object; readers see the one before or this one."""
        self.fs.pipe_file(self._at(name), data)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small object unless there is one; return whether there was none.

        Stores without conditional writes write it all the same: read it back to learn whose it is.
        """
        try:
            self.fs.pipe_file(self._at(name), data, mode="create")
        except FileExistsError:
            return False
        except (TypeError, NotImplementedError):
            self.put_bytes(name, data)
        return True

    def get(self, name: str, path: Path, alive: Callable[[], object] = lambda: None) -> None:
        """Download an object; call ``alive`` after each piece, if the library tells of pieces."""
        told = Callback(hooks={"alive": lambda size, value: alive()})
        self.fs.get_file(self._at(name), str(path), callback=told)

    def read(self, name: str, *, most: int) -> bytes | None:
        """Return a small object, at most ``most`` bytes and one more of it; None if there is none."""
        try:
            size = int(self.fs.info(self._at(name))["size"])
            found: bytes = self.fs.cat_file(self._at(name), start=0, end=min(size, most + 1)) if size else b""
        except FileNotFoundError:
            return None
        return found

    def sizes(self, under: str = "") -> dict[str, int]:
        """Return name -> bytes of all objects, or of those in the folder ``under``."""
        self.fs.invalidate_cache()
        try:
            found = self.fs.find(self._at(under).rstrip("/"), detail=True)
        except FileNotFoundError:
            return {}
        cut = len(self.root) + 1
        return {path[cut:]: int(entry.get("size") or 0) for path, entry in found.items() if len(path) > cut}

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; those that are gone already are no error."""
        with contextlib.suppress(FileNotFoundError):
            if names:
                self.fs.rm([self._at(name) for name in names])
        if self.on_disk:
            folders = {name.rpartition("/")[0] for name in names} - {""}
            folders |= {folder.rpartition("/")[0] for folder in folders} - {""}
            for folder in sorted(folders, key=len, reverse=True):
                with contextlib.suppress(OSError):  # others have files there
                    self.fs.rmdir(self._at(folder))


def in_words(problem: BaseException) -> str:
    """Return an exception of a client library in one short line."""
    text = " ".join(str(problem).split()) or "it said nothing"
    return f"{type(problem).__name__}: {text if len(text) <= 300 else text[:297] + '...'}"
