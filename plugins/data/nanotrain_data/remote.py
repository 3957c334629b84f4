"""A prepared folder elsewhere: files under a URL of fsspec, asked for again where that fails. Torch-free."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fsspec.core import url_to_fs

from nanotrain_core.api import DataError
from nanotrain_data.config import StreamingConfig
from nanotrain_data.manifest import NAME, Manifest, parse_manifest

T = TypeVar("T")
#: Seconds without a byte after which a request over HTTP has failed.
SILENCE = 60.0


class RemoteFolder:
    """A prepared folder under a URL."""

    def __init__(self, url: str, config: StreamingConfig) -> None:
        """Make the client; nothing is asked yet.

        Raises:
            DataError: no package is there for its protocol.
        """
        self.url, self._config = url.rstrip("/"), config
        try:
            # Clients of other threads and runs must not be shared, and what others put there must be seen.
            self._fs, root = url_to_fs(
                self.url, use_listings_cache=False, skip_instance_cache=True, **_request_options(self.url)
            )
        except (ImportError, ValueError) as error:
            raise DataError(f"{self.url}: {error}") from None
        self._root = root.rstrip("/")

    def manifest(self) -> Manifest:
        """Return its manifest.

        Raises:
            DataError: there is none, or it cannot be read.
        """
        path = f"{self.url}/{NAME}"
        return parse_manifest(
            path, self._retried(NAME, lambda: bytes(self._fs.cat_file(f"{self._root}/{NAME}")))
        )

    def fetch(self, name: str, to: Path, sha256: str) -> None:
        """Download a file, compare it with its hash, and have it on the disk.

        Raises:
            DataError: it is missing, damaged, or cannot be read after some attempts: by its URL. Or ``to``
                is gone, or may not be written.
        """

        def once() -> None:
            self._fs.get_file(f"{self._root}/{name}", str(to))
            with to.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())  # a rename may reach the disk before what the file holds
            if found != sha256:
                raise _Damaged(f"its SHA-256 is {found[:12]}..., and the manifest has {sha256[:12]}...")

        self._retried(name, once, to)

    def _retried(self, name: str, action: Callable[[], T], to: Path | None = None) -> T:
        url, config = f"{self.url}/{name}", self._config
        for attempt in range(1, config.attempts + 1):
            try:
                return action()
            except (FileNotFoundError, PermissionError) as error:
                if to is not None and error.filename == str(to):
                    text = f"{_who()}cannot write to the cache: {error.strerror}: {to}"
                elif isinstance(error, PermissionError):
                    text = f"{_who()}{url} may not be read: {in_words(error)}"
                else:
                    expected = "expected a folder that 'nanotrain data prepare' wrote"
                    text = f"{_who()}{url} does not exist: {expected if name == NAME else 'copy it again'}"
                raise DataError(text) from None
            except Exception as error:  # whatever the library of a protocol raises
                if attempt == config.attempts:
                    what = "is damaged" if isinstance(error, _Damaged) else "cannot be read"
                    times = f"{attempt} attempts" if attempt > 1 else "one attempt"
                    raise DataError(f"{_who()}{url} {what} after {times}: {in_words(error)}") from None
                time.sleep(config.retry_seconds * 2 ** (attempt - 1))
        raise AssertionError("there is one attempt at least")


def _request_options(url: str) -> dict[str, Any]:
    """Return what fsspec passes on to the requests of a client.

    aiohttp ends every request after five minutes, in which a large shard may not have come over a slow
    connection, or over one that many ranks share: here it ends one to which nothing comes for a minute.
    """
    if not url.startswith(("http://", "https://")):
        return {}
    from aiohttp import ClientTimeout  # fsspec needs it for these protocols

    return {"timeout": ClientTimeout(total=None, sock_connect=30.0, sock_read=SILENCE)}


class _Damaged(Exception):
    """A file is not what its manifest says."""


def in_words(problem: BaseException) -> str:
    """Return an exception of a client library in one short line."""
    # fsspec's timeout is raised from that of the client, which alone says what it waited for.
    text = " ".join((str(problem) or str(problem.__cause__ or "")).split()) or type(problem).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def _who() -> str:
    """Return which rank asked, where there are ranks."""
    rank = os.environ.get("RANK")
    return f"rank {rank}: " if rank else ""
