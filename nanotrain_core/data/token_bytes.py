"""The bytes of text that each token of a ``tokenizer.json`` stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

#: A token for one byte, of tokenizers that fall back to bytes.
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
#: The character for a space, of tokenizers such as SentencePiece's.
SPACE = "\u2581"


def bytes_of_tokens(tokenizer: Any) -> list[int] | None:
    """Return the number of bytes by token; None if tokens are not joined as plain bytes or pieces.

    Decoding a few tokens cannot tell: the parts of a character that is cut at their ends become U+FFFD, of
    three bytes, and a space at the beginning may be dropped. Special tokens stand for no text.

    Args:
        tokenizer: of the package ``tokenizers``.
    """
    described = json.loads(tokenizer.to_str())
    kinds = set(_kinds(described.get("decoder")))
    if not kinds & {"ByteLevel", "Metaspace", "ByteFallback"}:
        return None
    added = {each["id"]: each for each in described["added_tokens"]}
    sizes = [0] * (1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1))
    for piece, token in tokenizer.get_vocab(with_added_tokens=True).items():
        if token in added:
            sizes[token] = 0 if added[token]["special"] else len(added[token]["content"].encode())
        elif "ByteLevel" in kinds:  # a character of the piece for each byte
            sizes[token] = len(piece)
        else:
            sizes[token] = 1 if BYTE.fullmatch(piece) else len(piece.replace(SPACE, " ").encode())
    return sizes


def _kinds(decoder: Any) -> Iterator[str]:
    """Yield the types of a decoder, and of those it is a sequence of."""
    if decoder:
        yield decoder["type"]
        for each in decoder.get("decoders", ()):
            yield from _kinds(each)
