"""The recipe table of ``shards``. Never imports torch."""

from __future__ import annotations

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
        if not self.paths:
            raise ValueError("paths names no folder: expected some that 'nanotrain data prepare' wrote")
        if self.weights and len(self.weights) != len(self.paths):
            raise ValueError(
                f"{len(self.weights)} weights for {len(self.paths)} paths: expected one for each"
            )
