"""The data component ``streaming``: what ``shards`` reads, fetched shard by shard from a URL."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nanotrain_core.api import DataError
from nanotrain_core.api.text import HashedTokens
from nanotrain_core.api.torch import Batch, Shard
from nanotrain_data.codecs import Codec, codec_of
from nanotrain_data.config import StreamingConfig
from nanotrain_data.corpus import Corpus
from nanotrain_data.order import BlendedOrder, HeldOutOrder
from nanotrain_data.prefetch import Prefetch
from nanotrain_data.remote import RemoteFolder
from nanotrain_data.shard_cache import HASHES, ShardCache
from nanotrain_data.shards import Shards
from nanotrain_data.writer import map_tokens

Integers = npt.NDArray[np.int64]


class RemoteCorpus(Corpus):
    """Tokens of a prepared folder elsewhere, by their place in it."""

    #: Times that a shard may be deleted between its fetch and its reading.
    DELETED = 100

    def __init__(self, source: RemoteFolder, cache: ShardCache) -> None:
        """Read the manifest. No token is read.

        Raises:
            DataError: there is none, or it cannot be read.
        """
        self.source, self.cache = source, cache
        self.index(source.manifest())
        self._itemsize = np.dtype(self.manifest.dtype).itemsize
        self._read: dict[int, tuple[int, npt.NDArray[np.bool_]]] = {}  # file, and which of its pieces

    def fetch(self, number: int) -> Path:
        """Return the file of a shard in the cache, fetched if it is not there."""
        shard = self.manifest.shards[number]
        return self.cache.fetch(self.source, shard, shard.tokens * self._itemsize)

    def shard(self, number: int) -> HashedTokens:
        """Return the tokens of a shard, to be read at once: see ``ShardCache``."""
        for _ in range(self.DELETED):
            path = self.fetch(number)
            try:
                hashes = path.with_suffix(HASHES).read_bytes()
                tokens = map_tokens(path, self.manifest.dtype).view(np.ndarray)
                file = path.stat().st_ino
            except FileNotFoundError:
                continue  # it made room for another meanwhile
            known, compared = self._read.get(number, (0, None))
            found = CachedShard(path, tokens, hashes, compared if known == file else None)
            self._read[number] = file, found.compared
            return found
        raise DataError(f"{self.cache.folder} is too small for its ranks: raise data.cache_gb")


class CachedShard(HashedTokens):
    """Tokens of a shard in the cache."""

    def damaged(self, byte: int) -> DataError:
        """Name the file, and remove it: it was right when it was fetched, and is fetched again."""
        self.path.unlink(missing_ok=True)
        return DataError(
            f"{self.path} was damaged in the cache at byte {byte}, and was not trained on: the disk may "
            "fail; started again, the run fetches it anew"
        )


class Streaming(Shards):
    """Trains on the same tokens as :class:`Shards` does on the same folders."""

    name = "streaming"
    config: StreamingConfig
    #: Most bytes of held-out sequences that a rank keeps: each evaluation reads them, from all shards.
    HELD = 2**26

    def __init__(self, config: StreamingConfig) -> None:
        super().__init__(config)
        self._folder = Path(config.cache) if config.cache else default_cache()
        self._prefetch, self._asked_to = Prefetch(config.downloads), 0
        self._held: dict[tuple[int, int], Integers] = {}

    def open_corpora(self) -> Sequence[Corpus]:
        """Read the manifests."""
        cache = ShardCache(self._folder, int(self.config.cache_gb * 1e9))
        self._remote = [RemoteCorpus(RemoteFolder(url, self.config), cache) for url in self.config.urls]
        return self._remote

    def tokenizer_alone(self) -> Codec:
        """Return the tokenizer that the first folder holds a copy of, fetched beside the shards."""
        source = RemoteFolder(self.config.urls[0], self.config)
        manifest = source.manifest()
        info = manifest.tokenizer
        folder = self._folder / f"tokenizer-{info.sha256[:16]}"
        if info.file is not None and not (folder / info.file).exists():
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / f".{os.getpid()}.part"
            source.fetch(info.file, part, info.sha256)
            part.replace(folder / info.file)
        return codec_of(folder, manifest)

    def order(self, seed: int, *, validation: bool) -> BlendedOrder | HeldOutOrder:
        """Return the order of ``shards``, and keep it: it says what will be asked for."""
        found = super().order(seed, validation=validation)
        if not validation:
            self._order, self._asked_to = found, 0
        return found

    def train_batch(self, sequences: int, shard: Shard) -> Batch:
        """Advance by one global batch, and have the shards of later ones fetched."""
        batch = super().train_batch(sequences, shard)
        self._fetch_ahead(sequences, shard)
        return batch

    def _fetch_ahead(self, sequences: int, shard: Shard) -> None:
        """Queue the shards of this rank's rows in the next batches, without batches queued before."""
        end = self.position + sequences * self.config.fetch_ahead
        begin = self._asked_to if self.position <= self._asked_to <= end else self.position
        self._asked_to = end
        at = [first + row for first in range(begin, end, sequences) for row in shard.rows(sequences)]
        if not at:
            return
        for source, _, begins in self.places(self._order.at(at), validation=False):
            corpus = self._remote[source]
            for number in dict.fromkeys(corpus.shards_of(begins).tolist()):
                self._prefetch.put((source, number), partial(corpus.fetch, number))

    def read_sequences(self, numbers: Integers, *, validation: bool) -> Integers:
        """Return the tokens of those sequences of a split; those held out are kept.

        Raises:
            DataError: a shard cannot be fetched, by its URL, or the cache is too small for one.
        """
        if not validation:
            return super().read_sequences(numbers, validation=False)
        keys = [(self.length, number) for number in numbers.tolist()]
        missing = [number for length, number in keys if (length, number) not in self._held]
        fresh = {}
        if missing:
            read = super().read_sequences(np.array(missing, np.int64), validation=True)
            fresh = {(self.length, number): row for number, row in zip(missing, read, strict=True)}
        found = np.stack([fresh[key] if key in fresh else self._held[key] for key in keys])
        room = self.HELD // found[0].nbytes - len(self._held)
        self._held |= dict([*fresh.items()][: max(room, 0)])
        return found


def default_cache() -> Path:
    """Return where shards are kept unless a recipe says otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanotrain" / "shards"
