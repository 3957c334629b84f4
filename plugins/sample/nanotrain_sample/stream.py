"""Text of tokens as they come: what a token says may only be known with the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Stream:
    """Turns tokens into pieces of text that add up to the text of all of them.

    A token may be a part of a character, whose text is U+FFFD until the rest is there. And how a tokenizer
    writes a token may depend on the one before it, as a space at the beginning, so each piece is decoded with
    the tokens of the piece before.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int]) -> None:
        """Go on from the tokens ``before``, whose text is known."""
        self.decode, self.tokens = decode, list(before)
        self._begin, self._told = 0, len(self.tokens)

    def more(self, token: int) -> str:
        """Return the text that one more token adds, as far as it is sure."""
        self.tokens.append(token)
        return self._piece(unsure=False)

    def rest(self) -> str:
        """Return what is left at the end: characters that never became whole."""
        return self._piece(unsure=True)

    def _piece(self, *, unsure: bool) -> str:
        text = self.decode(self.tokens[self._begin :])
        if text.endswith("\ufffd") and not unsure:
            return ""
        piece = text[len(self.decode(self.tokens[self._begin : self._told])) :]
        self._begin, self._told = self._told, len(self.tokens)
        return piece
