"""Steps as a recipe names them: ``"1,10"``, ``"100:105"``, ``"0:10000:500"``; both ends are meant."""

from __future__ import annotations

import re

import attrs


@attrs.define(frozen=True)
class Steps:
    """Steps of a run."""

    parts: tuple[range, ...]

    @classmethod
    def parse(cls, text: str) -> Steps:
        """Read them.

        Raises:
            ValueError: it is another text, or a range has no step.

        >>> [step for step in range(30) if step in Steps.parse("3,10:25:5")]
        [3, 10, 15, 20, 25]
        """
        return cls(tuple(_part(word.strip()) for word in text.split(",")))

    def __contains__(self, step: int) -> bool:
        return any(step in part for part in self.parts)


def _part(word: str) -> range:
    found = re.fullmatch(r"(\d{1,10})(?::(\d{1,10})(?::(\d{1,10}))?)?", word)
    if not found:
        raise ValueError(
            f"expected steps such as '10', '100:105' or '0:10000:500', with commas between, got '{word}'"
        )
    first, last, stride = (int(number) if number else None for number in found.groups())
    assert first is not None
    if stride == 0 or (last is not None and last < first) or (last is None and first == 0):
        raise ValueError(f"'{word}' has no step: the first is 1, and ranges go up")
    return range(first, (first if last is None else last) + 1, stride or 1)
