"""The recipe tables of ``shards``, ``streaming`` and ``chat``. Never imports torch."""

from __future__ import annotations

from typing import Literal

import attrs

from nanotrain_core.api import LARGEST_SIZE, Range, has_password, path_field


@attrs.define(frozen=True, kw_only=True)
class ShardsConfig:
    """``[data] use = "shards"``: corpora that ``nanotrain data prepare`` wrote."""

    paths: tuple[str, ...] = path_field()
    """Prepared folders, relative to the recipe or absolute. Each is a source of the blend."""
    weights: tuple[float, ...] = attrs.field(default=(), validator=Range(0.0, 1e15, above=True))
    """Share of each source in the sequences trained on, in proportion to their sum. None: by their tokens,
    so that every source is read as often as the others."""
    validation_fraction: float = attrs.field(default=0.01, validator=Range(0.0, 1.0, below=True))
    """Share of each source held out, spread evenly over it."""
    piece_length: int = attrs.field(default=0, validator=Range(0, LARGEST_SIZE))
    """Tokens of the pieces that are held out as a whole. 0: the longest sequence of the recipe and its
    phases. A run that is to be resumed with longer sequences needs their length from its beginning."""
    mask_documents: bool = False
    """Whether tokens attend to those of their own document alone, where documents share a sequence."""
    shuffle_tokens: int = attrs.field(default=0, validator=Range(0, 2**62))
    """Sequences are shuffled within stretches of about so many tokens of a source, and these stretches among
    themselves: few shards are read from at a time. 0: over all of a source."""
    read_ahead: int = attrs.field(default=2, validator=Range(0, 1024))
    """Number of batches to prefetch in a thread."""

    def __attrs_post_init__(self) -> None:
        """Refuse no folder, and weights that do not fit.

        Raises:
            ValueError: there are none, or not one for each.
        """
        _check_sources(self.paths, self.weights, "nanotrain data prepare")


@attrs.define(frozen=True, kw_only=True)
class StreamingConfig:
    """``[data] use = "streaming"``: what ``shards`` reads, fetched from elsewhere as it is needed."""

    urls: tuple[str, ...]
    """Prepared folders as URLs of fsspec: ``s3://bucket/web``, ``https://...``. Each is a source."""
    weights: tuple[float, ...] = attrs.field(default=(), validator=Range(0.0, 1e15, above=True))
    """See ``shards``."""
    validation_fraction: float = attrs.field(default=0.01, validator=Range(0.0, 1.0, below=True))
    """See ``shards``. It is spread over all shards, of which an evaluation fetches those that it reads."""
    piece_length: int = attrs.field(default=0, validator=Range(0, LARGEST_SIZE))
    """See ``shards``."""
    mask_documents: bool = False
    """See ``shards``."""
    shuffle_tokens: int = attrs.field(default=0, validator=Range(0, 2**62))
    """Sequences are shuffled within stretches of about so many tokens of a source, and these stretches among
    themselves: few shards are read from at a time. 0: over all of a source."""
    cache: str | None = path_field(default=None)
    """Folder of this host that keeps shards, for all its ranks and runs. None: ``nanotrain/shards`` in the
    user's cache."""
    cache_gb: float = attrs.field(default=50.0, validator=Range(0.0, 1e9, above=True))
    """What it may hold, in units of 10^9 bytes: least recently used shards are evicted."""
    attempts: int = attrs.field(default=5, validator=Range(1, 100))
    """Attempts to fetch a file before the run fails."""
    retry_seconds: float = attrs.field(default=1.0, validator=Range(0.0, 3600.0))
    """Wait before the second attempt; before each later one twice as long."""
    fetch_ahead: int = attrs.field(default=16, validator=Range(0, 100_000))
    """Number of batches whose shards are fetched in advance, in threads."""
    downloads: int = attrs.field(default=2, validator=Range(1, 64))
    """Shards that a rank fetches at a time."""
    read_ahead: int = attrs.field(default=2, validator=Range(0, 1024))
    """Number of batches to prefetch in a thread."""

    @property
    def paths(self) -> tuple[str, ...]:
        """What messages call the sources."""
        return self.urls

    def __attrs_post_init__(self) -> None:
        """Refuse no URL, what is none, and weights that do not fit.

        Raises:
            ValueError: there are none, one has no protocol or a password, or there is not a weight for each.
        """
        if not self.urls:
            raise ValueError("urls names no folder: expected some that 'nanotrain data prepare' wrote")
        for url in self.urls:
            if "://" not in url:
                raise ValueError(f"'{url}' is no URL: expected one as s3://bucket/folder or file:///folder")
            if has_password(url):
                raise ValueError(
                    f"a URL of {url.partition('://')[0]} has a password, which logs and checkpoints would "
                    "show: expected none, but a file in ~/.config/fsspec or a variable of its library"
                )
        if self.weights and len(self.weights) != len(self.urls):
            raise ValueError(f"{len(self.weights)} weights for {len(self.urls)} urls: expected one for each")


@attrs.define(frozen=True, kw_only=True)
class ChatConfig:
    """``[data] use = "chat"``: conversations that ``nanotrain data prepare --chat`` wrote."""

    paths: tuple[str, ...] = path_field()
    """Prepared folders, relative to the recipe or absolute. Each is a source of the blend."""
    weights: tuple[float, ...] = attrs.field(default=(), validator=Range(0.0, 1e15, above=True))
    """Share of each source in the sequences trained on, in proportion to their sum. None: by how many
    sequences it has, so that every source is read as often as the others."""
    validation_fraction: float = attrs.field(default=0.01, validator=Range(0.0, 1.0, below=True))
    """Share of each source's conversations held out, spread evenly over it."""
    packed: bool = True
    """Whether conversations share sequences, each whole and attending to itself alone, which a model with
    document masks takes. False: one in each sequence, and padding behind it."""
    too_long: Literal["cut", "leave_out"] = "cut"
    """What becomes of a conversation longer than a sequence: its end is cut off, or it is left out."""
    read_ahead: int = attrs.field(default=2, validator=Range(0, 1024))
    """Number of batches to prefetch in a thread."""

    def __attrs_post_init__(self) -> None:
        """Refuse no folder, and weights that do not fit.

        Raises:
            ValueError: there are none, or not one for each.
        """
        _check_sources(self.paths, self.weights, "nanotrain data prepare --chat")


def _check_sources(paths: tuple[str, ...], weights: tuple[float, ...], command: str) -> None:
    if not paths:
        raise ValueError(f"paths names no folder: expected some that '{command}' wrote")
    if weights and len(weights) != len(paths):
        raise ValueError(f"{len(weights)} weights for {len(paths)} paths: expected one for each")
