"""A cache of tokens on disk, with a hash of each piece: damaged pieces are not trained on.

A cache entry is three files named after the text, the tokenizer and the hash of all hashes: ``.tokens``,
``.hashes`` with 16 bytes for every 64 KiB of them, and ``.checked`` with size, modification time and inode
that the tokens had at the last full verification. If these are unchanged, a start reads only the hashes (24
MB for 100 GB of tokens); otherwise one process of the host verifies all, and damaged entries are recreated.
In either case each piece is verified against its hash when a process first reads it: a bit that has flipped
since ends the run, with the file's name.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from nanotrain_core.data.hashed_tokens import HashedTokens, Tokens, block_hashes
from nanotrain_core.errors import DataError
from nanotrain_core.run.files import write_atomically, write_text_atomically
from nanotrain_core.run.progress_bar import show_progress


class TokenCache:
    """The tokens of one text by one tokenizer."""

    def __init__(self, key: str, dtype: np.dtype[Any]) -> None:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.folder, self.dtype = base / "nanotrain" / "tokens", dtype
        self.key = hashlib.sha256(key.encode()).hexdigest()[:32]

    def read(self) -> CachedTokens | None:
        """Return what was written, memory-mapped; None if there is no intact entry."""
        for path in sorted(self.folder.glob(f"{self.key}-*.tokens")):
            try:
                hashes = path.with_suffix(".hashes").read_bytes()
                tokens = np.memmap(path, self.dtype, mode="r")
            except (OSError, ValueError):  # missing, empty, or truncated within a token
                continue
            found = CachedTokens(path, tokens, hashes)
            if path.name == self._name(hashes) and found.is_whole():
                return found
            log = structlog.get_logger("nanotrain.data")
            log.warning("cached tokens are damaged, and made anew", path=str(path))
        return None

    def write(self, tokens: Tokens) -> None:
        """Store tokens for the next run, replacing older ones of their key; without a folder, do nothing."""
        hashes = block_hashes(tokens)
        path = self.folder / self._name(hashes)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path.with_suffix(".hashes"), lambda file: file.write_bytes(hashes))
            # Not tokens.tofile, which ignores that the last bytes did not fit on the disk.
            write_atomically(path, lambda file: file.write_bytes(np.ascontiguousarray(tokens).data))
            _note_checked(path)
            for other in self.folder.glob(f"{self.key}-*"):
                if other.stem != path.stem:
                    other.unlink(missing_ok=True)
        except OSError:
            pass  # the next run tokenizes again

    def _name(self, hashes: bytes) -> str:
        return f"{self.key}-{hashlib.sha256(hashes).hexdigest()}.tokens"


class CacheDamaged(DataError):
    """Cached tokens are damaged. They were deleted: the next start tokenizes the text anew."""

    restart_helps = True


class CachedTokens(HashedTokens):
    """Tokens of the cache. Damaged ones are deleted, to be recreated."""

    def damaged(self, byte: int) -> CacheDamaged:
        """Delete the files."""
        for suffix in (".checked", ".hashes", ".tokens"):
            with suppress(OSError):
                self.path.with_suffix(suffix).unlink(missing_ok=True)
        return CacheDamaged(
            f"the cached tokens {self.path} are damaged at byte {byte}, and were deleted: "
            "start again with --resume, and the text is tokenized anew"
        )

    def tolist(self) -> list[int]:
        """Return all tokens."""
        found: list[int] = self[:].tolist()
        return found

    def is_whole(self) -> bool:
        """Return whether there are as many hashes as pieces, and no piece is known to be damaged.

        All pieces are verified if that was not done since the file changed, by one process of the host.
        """
        if not self.has_hashes():
            return False
        if _was_checked(self.path):
            return True
        with _alone(self.path.with_suffix(".hashes")):
            if _was_checked(self.path):
                return True
            with show_progress("verifying cached tokens"):
                whole = self.first_damaged() is None
            if whole:
                with suppress(OSError):  # the next start verifies again
                    _note_checked(self.path)
            return whole


def _form(path: Path) -> dict[str, int]:
    found = path.stat()
    return {"size": found.st_size, "mtime_ns": found.st_mtime_ns, "inode": found.st_ino}


def _was_checked(path: Path) -> bool:
    try:
        return bool(json.loads(path.with_suffix(".checked").read_bytes()) == _form(path))
    except (OSError, ValueError):
        return False


def _note_checked(path: Path) -> None:
    write_text_atomically(path.with_suffix(".checked"), json.dumps(_form(path)))


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock against other processes with the same file, if the file system supports locks."""
    with path.open("rb") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
