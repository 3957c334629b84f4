"""Hugging Face's ``tokenizer.json``, opened so that a text has the same tokens everywhere, none special."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from nanotrain_core.data.documents import missing_path
from nanotrain_core.data.token_bytes import BYTE
from nanotrain_core.errors import DataError


def open_tokenizer_file(path: Path, *, as_text: Collection[str] | None = None) -> Any:
    """Return a ``tokenizer.json`` as the package ``tokenizers`` has it, which cuts, pads and drops nothing.

    Args:
        path: of the file.
        as_text: if given, the words of special tokens and of these added tokens are text like any other.

    Raises:
        DataError: the file is missing or is not a tokenizer, or the package ``tokenizers`` is.
    """
    tokenizer = parse_tokenizer(path, read_tokenizer(path))
    unset(tokenizer)
    return tokenizer if as_text is None else text_only(tokenizer, as_text)


def unset(tokenizer: Any) -> None:
    """Turn off what a file sets for a model's inputs or its training."""
    tokenizer.no_truncation()  # long documents would be cut
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):  # other tokens in each process and each time
        tokenizer.model.dropout = None


def text_only(tokenizer: Any, words: Collection[str] = ()) -> Any:
    """Return a tokenizer, the same or a copy, that makes no special token of a text.

    Args:
        tokenizer: of the package ``tokenizers``; its special tokens become text.
        words: of other added tokens that become text, too.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    if words:
        tokenizer.add_special_tokens([token for token in added if token.content in words])
    tokenizer.encode_special_tokens = True
    special = [token.content for token in added if token.special or token.content in words]
    pieces = {word for word in special if _is_piece(tokenizer, word)}
    return _without(tokenizer, pieces) if any(_found(tokenizer, pieces)) else tokenizer


def _is_piece(tokenizer: Any, word: str) -> bool:
    """Return whether the model itself has a special token: then its algorithm may find it in a text."""
    of_byte = BYTE.fullmatch(word) is not None  # needed for characters that the vocabulary lacks
    unknown = word == getattr(tokenizer.model, "unk_token", None)
    return not of_byte and not unknown and tokenizer.model.token_to_id(word) is not None


def _found(tokenizer: Any, pieces: Collection[str]) -> Iterator[bool]:
    """Yield of texts that have pieces whether the model finds one of them there."""
    if type(tokenizer.model).__name__ == "Unigram":  # prefers them to all else: their score is 0
        yield bool(pieces)
    for word in pieces:
        for text in (word, f"a{word}a", f" {word} ", f"a\n{word}\n"):
            yield tokenizer.token_to_id(word) in tokenizer.encode(text, add_special_tokens=False).ids


def _without(tokenizer: Any, pieces: Collection[str]) -> Any:
    """Return a copy whose model has random words in the place of pieces: no text has them."""
    described = json.loads(tokenizer.to_str())
    # Their numbers are the model's. Others keep theirs, since they are added in the same order.
    described["added_tokens"] = [each for each in described["added_tokens"] if each["content"] not in pieces]
    model = described["model"]
    hidden = {piece: uuid4().hex for piece in pieces}
    if model["type"] == "Unigram":
        model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {hidden.get(piece, piece): number for piece, number in model["vocab"].items()}
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not {*pair, "".join(pair)} & hidden.keys()]
    copy = type(tokenizer).from_str(json.dumps(described))
    copy.encode_special_tokens = True
    return copy


def read_tokenizer(path: Path) -> bytes:
    """Return what a file holds.

    Raises:
        DataError: it is missing, or cannot be read.
    """
    if not path.exists():
        raise DataError(missing_path(path, "tokenizer"))
    if path.is_dir():
        raise DataError(f"tokenizer {path} is a folder; expected a file, such as {path / 'tokenizer.json'}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read tokenizer {path}: {error.strerror}") from None


def parse_tokenizer(path: Path, content: bytes) -> Any:
    """Return the tokenizer that a file holds, as it is there.

    Raises:
        DataError: it is none, or the package ``tokenizers`` is missing.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise DataError(
            f"the tokenizer {path} needs the package tokenizers: pip install nanotrain-core[tokenizers], "
            "or use tokenizer = 'bytes'"
        ) from None
    try:
        return Tokenizer.from_buffer(content)
    except Exception as error:  # The package raises bare Exception.
        raise DataError(f"{path} is not a tokenizer.json of Hugging Face: {error}") from None
