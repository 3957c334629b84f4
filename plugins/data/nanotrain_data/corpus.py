"""A prepared folder, open for reading: tokens of all shards end to end, mapped into memory.

Mapped pages belong to the host's page cache: ranks share them, and the kernel can evict them. In addition, a
process holds one byte for each 64 KiB of tokens in the shards that it has read, which records what was
compared with its hash, and the hashes of the shards that are open.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nanotrain_core.api import DataError
from nanotrain_core.api.text import HashedTokens
from nanotrain_data.manifest import Manifest, read_manifest
from nanotrain_data.verify import size_problems
from nanotrain_data.writer import map_tokens

Integers = npt.NDArray[np.int64]


class ShardTokens(HashedTokens):
    """Tokens of one shard."""

    def damaged(self, byte: int) -> DataError:
        """Name the shard; its files stay as they are."""
        return DataError(
            f"shard {self.path} is damaged at byte {byte}, and was not trained on: "
            f"'nanotrain data inspect {self.path.parent} --verify' tells what else is; copy the file again, "
            "or prepare the folder again"
        )


class OpenShards:
    """The shards that were read last, of all sources: a file that is mapped keeps a file descriptor."""

    #: At most, of the 1024 descriptors that a process usually has.
    MOST = 256

    def __init__(self) -> None:
        self._open: OrderedDict[Path, ShardTokens] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: Path, make: Callable[[], ShardTokens]) -> ShardTokens:
        """Return a shard, opened by ``make`` if it is not open."""
        with self._lock:
            found = self._open.get(path) or make()
            self._open[path] = found
            self._open.move_to_end(path)
            if len(self._open) > self.MOST:
                self._open.popitem(last=False)
            return found


class Corpus:
    """Tokens of a prepared folder by their place in it."""

    def __init__(self, folder: Path, opened: OpenShards) -> None:
        """Open a folder. No token is read.

        Raises:
            DataError: it is no prepared folder, or a file is missing or has another size, by its name.
        """
        self.folder = folder
        self.index(read_manifest(folder))
        problems = size_problems(folder, self.manifest)
        if problems:
            raise DataError("\n".join(problems))
        self._opened = opened
        self._compared: dict[int, npt.NDArray[np.bool_]] = {}

    def index(self, manifest: Manifest) -> None:
        """Note where shards end."""
        self.manifest = manifest
        self._ends = np.cumsum([shard.tokens for shard in manifest.shards], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, begins: Integers, count: int) -> Integers:
        """Return ``count`` tokens from each of ``begins``, [n, count]; they may reach into later shards.

        Raises:
            DataError: some are not those that were written, or their file is gone.
        """
        found = np.empty((len(begins), count), np.int64)
        shards = self.shards_of(begins)
        for row, (begin, first_shard) in enumerate(zip(begins.tolist(), shards.tolist(), strict=True)):
            done, shard = 0, first_shard
            while done < count:
                first = begin + done - (int(self._ends[shard - 1]) if shard else 0)
                last = min(first + count - done, self.manifest.shards[shard].tokens)
                tokens = self.shard(shard)
                some = tokens[first:last]
                if len(some) < last - first:  # what follows would be read from the wrong place
                    raise tokens.damaged(len(tokens) * tokens.dtype.itemsize)
                found[row, done : done + len(some)] = some
                done, shard = done + len(some), shard + 1
        return found

    def shards_of(self, places: Integers) -> Integers:
        """Return the numbers of the shards that have the tokens at ``places``, [n]."""
        return np.searchsorted(self._ends, places, side="right")

    def shard(self, number: int) -> HashedTokens:
        """Return the tokens of a shard, to be read at once."""
        path = self.folder / f"{self.manifest.shards[number].name}.tokens"
        return self._opened.get(path, lambda: self._open(number, path))

    def _open(self, number: int, path: Path) -> ShardTokens:
        info, of_hashes = self.manifest.shards[number], path.with_suffix(".hashes")
        try:
            hashes = of_hashes.read_bytes()
            tokens = map_tokens(path, self.manifest.dtype).view(np.ndarray)
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read shard {path}: {error}") from None
        if hashlib.sha256(hashes).hexdigest() != info.hashes_sha256:
            raise DataError(f"{of_hashes} is damaged: its SHA-256 is another than the manifest says")
        if len(tokens) != info.tokens:
            raise DataError(f"shard {path} has {len(tokens)} tokens, and {info.tokens} were written")
        found = ShardTokens(path, tokens, hashes, self._compared.get(number))
        self._compared[number] = found.compared
        return found
