"""The recipe tables of ``shards`` and ``chat``. Never imports torch."""

from __future__ import annotations

from typing import Literal

import attrs

from nanotrain_core.api import LARGEST_SIZE, Range, path_field


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
    read_ahead: int = attrs.field(default=2, validator=Range(0, 1024))
    """Batches that a thread reads before they are asked for."""

    def __attrs_post_init__(self) -> None:
        """Refuse no folder, and weights that do not fit.

        Raises:
            ValueError: there are none, or not one for each.
        """
        _check_sources(self.paths, self.weights, "nanotrain data prepare")


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
    """Batches that a thread reads before they are asked for."""

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
