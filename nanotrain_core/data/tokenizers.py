"""Text to tokens: plain bytes, or any Hugging Face ``tokenizer.json``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from nanotrain_core.data.codec import TextCodec
from nanotrain_core.data.documents import Document
from nanotrain_core.data.hashed_tokens import Tokens
from nanotrain_core.data.token_bytes import bytes_of_tokens
from nanotrain_core.data.token_cache import CachedTokens, TokenCache
from nanotrain_core.data.tokenizer_files import parse_tokenizer, read_tokenizer, text_only, unset
from nanotrain_core.errors import DataError
from nanotrain_core.run.progress_bar import show_progress

#: Names of the end-of-document token in public tokenizers, in search order: first among special tokens.
END_OF_TEXT = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "[SEP]",
)


class Tokenizer(TextCodec, Protocol):
    """The interface that ``text`` requires of a tokenizer."""

    name: str
    """Short, and different for different tokenizers."""

    def tokenize(self, documents: Sequence[Document], fingerprint: str) -> Tokens | CachedTokens:
        """Return all documents as one array of the smallest unsigned type, each followed by a separator."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, as :meth:`encode` does."""
        ...

    def byte_count(self, tokens: Sequence[int]) -> int:
        """Return the number of bytes of text that ``tokens`` represent."""
        ...


class Bytes:
    """A token for each of the 256 bytes; byte 0 ends a document."""

    name = "bytes"
    vocab_size = 256
    separator: int | None = 0

    def tokenize(self, documents: Sequence[Document], fingerprint: str) -> Tokens:
        """Return the bytes themselves."""
        return np.frombuffer(b"".join(part for d in documents for part in (d.content, b"\0")), np.uint8)

    def encode(self, text: str) -> list[int]:
        """Return the bytes of UTF-8."""
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the bytes of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode to text, with U+FFFD where bytes are invalid UTF-8 or tokens are not bytes."""
        return bytes(t if t < 256 else 0xFF for t in tokens).decode(errors="replace")

    def byte_count(self, tokens: Sequence[int]) -> int:
        """Return the number of bytes: one for each token."""
        return len(tokens)


class TokenizerFile:
    """A Hugging Face ``tokenizer.json``. Tokenized text is cached, since it takes minutes per gigabyte."""

    #: Documents and bytes tokenized at a time. This bounds the memory of the encodings and sets the interval
    #: of progress reports. A longer document is tokenized by itself.
    DOCUMENTS, BYTES = 64, 2**22

    def __init__(self, path: Path) -> None:
        content = read_tokenizer(path)
        self._tokenizer = parse_tokenizer(path, content)
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        named = [vocab[word] for word in END_OF_TEXT if word in vocab]
        added = self._tokenizer.get_added_tokens_decoder()
        special = {number for number, token in added.items() if token.special}
        # Ordinary pieces may be called so, too: </s> is a tag of HTML to a tokenizer that has <eos>.
        self.separator = next((token for token in named if token in special), next(iter(named), None))
        unset(self._tokenizer)
        # <|endoftext|> in a document's text does not end it, and a message cannot begin a turn.
        self._text_only = text_only(self._tokenizer)
        self.name = f"{path.name} {hashlib.sha256(content).hexdigest()[:12]}"

    def tokenize(self, documents: Sequence[Document], fingerprint: str) -> Tokens | CachedTokens:
        """Return the tokens of all documents, from the cache if present.

        Each ends with the tokenizer's end-of-text token, if it has one of the known names.

        Raises:
            DataError: one is not UTF-8.
        """
        cache = TokenCache(f"{fingerprint}/{self.name}", self._dtype)
        known = cache.read()
        if known is not None:
            return known
        made: Tokens = np.concatenate([np.empty(0, self._dtype), *self._pieces(documents)])
        cache.write(made)
        return made

    @property
    def _dtype(self) -> np.dtype[Any]:
        return np.min_scalar_type(self.vocab_size - 1)

    def _pieces(self, documents: Sequence[Document]) -> list[Tokens]:
        end = [] if self.separator is None else [self.separator]
        pieces = []
        with show_progress("tokenizing", sum(len(d.content) for d in documents), "B") as advance:
            for some in self._batches(documents):
                texts = [_text_of(document) for document in some]
                pieces += [np.array(tokens + end, self._dtype) for tokens in self.encode_batch(texts)]
                advance(sum(len(d.content) for d in some))
        return pieces

    def _batches(self, documents: Sequence[Document]) -> Iterator[list[Document]]:
        some: list[Document] = []
        size = 0
        for document in documents:
            if some and (len(some) == self.DOCUMENTS or size + len(document.content) > self.BYTES):
                yield some
                some, size = [], 0
            some.append(document)
            size += len(document.content)
        if some:
            yield some

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text`` without special ones; the text of a special token stays text."""
        return list(self._text_only.encode(text, add_special_tokens=False).ids)

    def encode_special(self, text: str) -> list[int]:
        """Return the tokens of ``text``, in which the text of a special token becomes that token."""
        other = type(self._tokenizer).from_str(self._tokenizer.to_str())  # which by default parses them
        return list(other.encode(text, add_special_tokens=False).ids)

    @property
    def prefix(self) -> tuple[int, ...]:
        """The special tokens that the file puts before a text, such as BOS; :meth:`encode` adds none."""
        example = self._tokenizer.encode("a")
        added = takewhile(lambda pair: pair[1], zip(example.ids, example.special_tokens_mask, strict=True))
        return tuple(token for token, _ in added)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, using all processors."""
        found = self._text_only.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``, without special ones."""
        return str(self._tokenizer.decode(list(tokens)))

    def byte_count(self, tokens: Sequence[int]) -> int:
        """Return the bytes that tokens stand for; of an unusual tokenizer, those of the decoded text."""
        if self._sizes is None:
            return len(self.decode(tokens).encode())
        return sum(self._sizes[token] for token in tokens if token < len(self._sizes))

    @cached_property
    def _sizes(self) -> list[int] | None:
        return bytes_of_tokens(self._tokenizer)


def make_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a recipe: ``bytes``, or the path of a ``tokenizer.json``.

    Raises:
        DataError: the file is missing or is not a tokenizer, or the package ``tokenizers`` is.
    """
    return Bytes() if name == "bytes" else TokenizerFile(Path(name))


def _text_of(document: Document) -> str:
    """Return a document's text.

    Raises:
        DataError: it is not UTF-8. Replacement characters would be learned.
    """
    try:
        return document.content.decode()
    except UnicodeDecodeError as problem:
        where = f"{document.name}: no UTF-8 at byte {problem.start}"
        raise DataError(
            f"{where}; expected a text: convert it, see iconv, or use tokenizer = 'bytes'"
        ) from None
