"""How the tokens of each source are cut: pieces that are held out or trained on as a whole. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs

from nanotrain_core.api import DataError
from nanotrain_core.api.text import Split, held_out
from nanotrain_data.config import ShardsConfig, StreamingConfig
from nanotrain_data.manifest import Manifest


@attrs.define(frozen=True)
class Pieces:
    """Of one source."""

    length: int
    """Tokens of a piece, which reads one more: the next one is its last target."""
    split: Split

    def sequences(self, length: int, *, validation: bool) -> int:
        """Return how many sequences of ``length`` tokens a split has."""
        return self.length // length * (self.split.held if validation else self.split.train)


def pieces_of(
    config: ShardsConfig | StreamingConfig, manifests: Sequence[Manifest], longest: int
) -> list[Pieces]:
    """Cut each source into pieces of ``longest`` tokens.

    Raises:
        DataError: a source has less than one.
    """
    found = []
    for path, manifest in zip(config.paths, manifests, strict=True):
        count = (manifest.tokens - 1) // longest
        if count < 1:
            raise DataError(
                f"{path} has {manifest.tokens} tokens, but one sequence of {longest} needs {longest + 1}: "
                "lower batch.length, or prepare more text"
            )
        found.append(Pieces(longest, Split(count, held_out(count, config.validation_fraction))))
    return found


def check_alike(config: ShardsConfig | StreamingConfig, manifests: Sequence[Manifest]) -> None:
    """Check that sources are text of one tokenizer, with an end-of-document token if documents are masked.

    Raises:
        DataError: naming two sources with different tokenizers, or one of conversations or without the token.
    """
    for path, each in zip(config.paths, manifests, strict=True):
        if each.chat is not None:
            raise DataError(
                f"{path} holds conversations, whose prompts would be learned too; expected text, or "
                "data.use = 'chat', which learns the assistant's words alone"
            )
    check_one_tokenizer(config.paths, manifests)
    for path, other in zip(config.paths, manifests, strict=True):
        if config.mask_documents and other.end_of_document is None:
            raise DataError(
                f"{path} has documents that end with no token, and mask_documents finds them by it: "
                "prepare it with a tokenizer that has one, and without --no-end"
            )


def check_one_tokenizer(paths: Sequence[str], manifests: Sequence[Manifest]) -> None:
    """Check that all sources were made with one tokenizer.

    Raises:
        DataError: two were not, by their names.
    """
    first = manifests[0]
    for path, other in zip(paths, manifests, strict=True):
        if other.tokenizer.sha256 != first.tokenizer.sha256:
            raise DataError(
                f"{paths[0]} has tokens of {first.tokenizer.name}, and {path} of "
                f"{other.tokenizer.name} ({other.tokenizer.sha256[:12]}, not {first.tokenizer.sha256[:12]}): "
                "expected one tokenizer for all sources"
            )


def source_names(paths: Sequence[str]) -> list[str]:
    """Return a word for each source: the name of its folder, with a number where two are called the same."""
    found: list[str] = []
    for path in paths:
        word = "".join(c if c.isascii() and (c.isalnum() or c in "_-.") else "_" for c in Path(path).name)
        word = word or "source"
        name, number = word, len(found)
        while name in found:
            name, number = f"{word}-{number}", number + 1
        found.append(name)
    return found
