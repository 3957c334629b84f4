"""``Range``: the numbers that a key of a recipe may have, for its validator and for editors."""

from __future__ import annotations

from typing import Any

import attrs

#: The largest size or count: PyTorch's and NCCL's counts of elements are 32-bit integers in places.
LARGEST_COUNT = 2**31 - 1
#: The largest dimension of a model's tensors.
LARGEST_SIZE = 2**27
#: The most layers of a model, which commands list one by one.
MOST_LAYERS = 10_000


@attrs.define(frozen=True, init=False)
class Range:
    """A validator of an attrs field: ``attrs.field(default=1, validator=Range(1))``.

    The JSON Schema of recipes has its bounds. NaN is in no range.
    """

    least: float
    most: float
    above: bool
    below: bool

    def __init__(
        self, least: float, most: float | None = None, *, above: bool = False, below: bool = False
    ) -> None:
        """Admit numbers from ``least`` to ``most``.

        Args:
            least: an ``int`` for keys that are integers.
            most: of integers :data:`LARGEST_COUNT` unless given; others need it.
            above: ``least`` itself is left out.
            below: ``most`` itself is left out.

        Raises:
            TypeError: a range of numbers that are no integers has no upper end.
        """
        if most is None and not isinstance(least, int):
            raise TypeError("a range of floats needs its upper end")
        self.__attrs_init__(least, LARGEST_COUNT if most is None else most, above, below)

    def __contains__(self, value: float) -> bool:
        low = self.least < value if self.above else self.least <= value
        return low and (value < self.most if self.below else value <= self.most)

    def __call__(self, instance: Any, field: Any, value: Any) -> None:
        """Refuse a value outside of the range, or a tuple with one; None is left out.

        Raises:
            ValueError: with what was expected.
        """
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and number not in self:
                raise ValueError(f"expected {self}, got {number}")

    def __str__(self) -> str:
        if isinstance(self.least, int):
            return f"an integer from {self.least:,} to {self.most:,}"
        low, high = ("above" if self.above else "from"), ("below" if self.below else "at most")
        return f"a number {low} {self.least:g} and {high} {self.most:g}"

    def schema(self) -> dict[str, float]:
        """Return the bounds as JSON Schema writes them."""
        return {
            "exclusiveMinimum" if self.above else "minimum": self.least,
            "exclusiveMaximum" if self.below else "maximum": self.most,
        }
