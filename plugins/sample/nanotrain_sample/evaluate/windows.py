"""What is asked of a model: how likely the last tokens of a sequence are after those before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs


@attrs.define(frozen=True)
class Request:
    """A sequence and how many of its last tokens are scored: at least one, and not the first."""

    tokens: tuple[int, ...]
    scored: int


def windows(tokens: Sequence[int], length: int, stride: int, start: Sequence[int]) -> Iterator[Request]:
    """Yield requests that score each token of a document once.

    Args:
        tokens: of the document.
        length: that the model reads at once, at most.
        stride: how many tokens a request scores: all others of its window are context. From 1 to ``length``.
        start: tokens that stand before the first, such as BOS; empty: the first token is context alone, and
            not scored.

    Source: the sliding window of Hugging Face's "Perplexity of fixed-length models".

    >>> [(r.tokens, r.scored) for r in windows([1, 2, 3, 4, 5], 3, 2, [0])]
    [((0, 1, 2), 2), ((1, 2, 3, 4), 2), ((2, 3, 4, 5), 1)]
    """
    text = [*start, *tokens]
    for begin in range(max(1, len(start)), len(text), stride):
        end = min(begin + stride, len(text))
        yield Request(tuple(text[max(0, end - 1 - length) : end]), end - begin)
