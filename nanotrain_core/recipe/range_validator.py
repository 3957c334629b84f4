"""``Range`` and ``not_empty``: the allowed values of a recipe key, for its validator and for editors."""

from __future__ import annotations

from typing import Any

import attrs

#: The largest size or count: PyTorch and NCCL use 32-bit element counts in some places.
LARGEST_COUNT = 2**31 - 1
#: The largest dimension of a model's tensors.
LARGEST_SIZE = 2**27
#: The maximum number of layers of a model, which commands list one by one.
MOST_LAYERS = 10_000


@attrs.define(frozen=True, init=False)
class Range:
    """A validator of an attrs field: ``attrs.field(default=1, validator=Range(1))``.

    The JSON Schema of recipes contains its bounds. NaN is in no range.
    """

    least: float
    """The smallest value; an ``int`` for keys that are integers."""
    most: float
    """The largest value. Integers need none: :data:`LARGEST_COUNT`."""
    above: bool
    """Whether ``least`` itself is excluded."""
    below: bool
    """Whether ``most`` itself is excluded."""

    def __init__(
        self, least: float, most: float | None = None, *, above: bool = False, below: bool = False
    ) -> None:
        """Admit numbers from ``least`` to ``most``.

        Args:
            least: an ``int`` for keys that are integers.
            most: for integers :data:`LARGEST_COUNT` by default; required for others.
            above: exclude ``least`` itself.
            below: exclude ``most`` itself.

        Raises:
            TypeError: a range of non-integers has no upper bound.
        """
        if most is None and not isinstance(least, int):
            raise TypeError(
                f"Range({least}) of numbers that are not integers needs its upper end: Range({least}, 1e6)"
            )
        self.__attrs_init__(least, LARGEST_COUNT if most is None else most, above, below)

    def __contains__(self, value: float) -> bool:
        low = self.least < value if self.above else self.least <= value
        return low and (value < self.most if self.below else value <= self.most)

    def __call__(self, instance: Any, field: Any, value: Any) -> None:
        """Reject a value outside the range, or a tuple with one; None is ignored.

        Raises:
            ValueError: the text says what was expected.
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
        """Return the bounds as JSON Schema keywords."""
        return {
            "exclusiveMinimum" if self.above else "minimum": self.least,
            "exclusiveMaximum" if self.below else "maximum": self.most,
        }


def not_empty(instance: Any, field: Any, value: Any) -> None:
    """Reject an empty array: a validator of an attrs field; None is ignored.

    Raises:
        ValueError: the text says what was expected.
    """
    if value is not None and not len(value):
        raise ValueError("expected at least one item, got an empty array")
