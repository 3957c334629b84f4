"""The interface of a tokenizer for code that reads or writes text. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable


class TextCodec(Protocol):
    """Text to tokens and back."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def separator(self) -> int | None:
        """The token that ends a document; None: unknown."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


@runtime_checkable
class EncodesSpecial(Protocol):
    """Optional interface of a tokenizer with special tokens that text can name."""

    def encode_special(self, text: str) -> list[int]:
        """Return the tokens of ``text``, in which the text of a special token becomes that token."""
        ...


@runtime_checkable
class HasPrefix(Protocol):
    """Optional interface of a tokenizer that puts special tokens before a text, such as BOS."""

    @property
    def prefix(self) -> tuple[int, ...]: ...


@runtime_checkable
class HasTokenizer(Protocol):
    """Optional interface of a data component whose tokens are text: decoding text requires no data."""

    def tokenizer_alone(self) -> TextCodec:
        """Return the tokenizer, without opening the data.

        Raises:
            DataError: one of its files is missing.
        """
        ...


@runtime_checkable
class HasConversations(Protocol):
    """Optional interface of a data component of conversations: a prompt for the assistant's answer."""

    def answer_prompt(self, messages: Sequence[Mapping[str, str]]) -> tuple[list[int], frozenset[int]]:
        """Return the tokens of a prompt for the assistant's answer, and the tokens that may end the answer.

        Args:
            messages: each with ``role`` (``system``, ``user``, ``assistant``) and ``content``.

        Raises:
            DataError: the code or template that renders them is missing, or rejects them.
        """
        ...
