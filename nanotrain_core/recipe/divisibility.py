"""How finely a model can be sharded, from its config alone: for checks before any process starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import gcd
from typing import TYPE_CHECKING

import attrs

from nanotrain_core.errors import Problem
from nanotrain_core.layout.roles import Role

if TYPE_CHECKING:
    from nanotrain_core.recipe.model_config import ModelConfig


@attrs.define(frozen=True)
class Divisible:
    """A number of units in modules of some roles, which a degree must divide to shard them."""

    roles: tuple[Role, ...]
    key: str
    """Recipe key that sets the number: ``model.heads``."""
    units: int
    """Heads, rows of the vocabulary, experts: lengths in the ``unit`` of the modules' tags."""
    what: str
    """The name of the units, in the plural."""
    width: bool = False
    """For EXPERTS: whether these are the width of each expert, along the ``split`` of the tag, not their
    number."""
    grouped: bool = False
    """Whether several ranks may use one unit, as with ``grouped`` of the modules' tags."""
    heads: bool = False
    """Whether these are attention heads, which are independent of one another."""
    row: int = 0
    """Length of the rows of a weight that consist of all units, and are split if ranks shard the units: a
    ROW's inputs, the width of EXPERTS. 0: none, or unspecified."""

    def fits(self, degree: int) -> bool:
        """Return whether ``degree`` ranks can shard the units."""
        return self.units % degree == 0 or self.grouped

    def problem(self, dim: str, degree: int, others: Iterable[Divisible] = ()) -> Problem:
        """Return a problem: ``degree`` ranks along ``dim`` do not divide the units; suggest others that do.

        Those also divide the units of ``others``, which the same ranks shard.
        """
        common = gcd(self.units, *(other.units for other in others if not other.grouped))
        return Problem(
            self.key,
            f"{self.units} {self.what} do not divide by {dim} = {degree}; {dim} could be "
            f"{join_with_or(divisors_near(common, degree))}, their number "
            f"{join_with_or(multiples_near(self.units, degree))}",
        )


def divisibility_of(config: ModelConfig) -> tuple[Divisible, ...] | None:
    """Return the result of ``divisibility()`` of a model's config; None if it is not known."""
    told = config.divisibility()
    return None if told is None else tuple(told)


def divisors_near(length: int, degree: int) -> list[int]:
    """Return the divisors of ``length`` next below and above ``degree``, which is not one itself.

    >>> divisors_near(8, 3), divisors_near(8, 16)
    ([2, 4], [8])
    """
    divisors = [n for n in range(1, length + 1) if length % n == 0]
    below, above = [n for n in divisors if n < degree], [n for n in divisors if n > degree]
    return [*below[-1:], *above[:1]]


def multiples_near(length: int, degree: int) -> list[int]:
    """Return the multiples of ``degree`` next below and above ``length``.

    >>> multiples_near(10, 4), multiples_near(3, 4)
    ([8, 12], [4])
    """
    low = length // degree * degree
    return [n for n in (low, low + degree) if n]


def join_with_or(numbers: Sequence[int]) -> str:
    """Join numbers by "or"."""
    return " or ".join(map(str, numbers))


def too_few_units(config: ModelConfig, roles: Iterable[Role], dim: str, degree: int) -> Iterator[Problem]:
    """Yield a problem for each extent of ``roles`` with fewer units than ranks: shards may be uneven."""
    wanted = {*roles}
    for extent in divisibility_of(config) or ():
        if wanted & {*extent.roles} and extent.units < degree:
            yield Problem(extent.key, f"{extent.units} {extent.what} are fewer than {dim} = {degree} ranks")


def indivisible(
    config: ModelConfig, roles: Iterable[Role], dim: str, degree: int, *, width: bool = False
) -> Iterator[Problem]:
    """Yield a problem for each extent of any of ``roles`` that ``degree`` does not divide."""
    wanted = {*roles}
    declared = divisibility_of(config) or ()
    extents = [extent for extent in declared if wanted & {*extent.roles} and extent.width == width]
    for extent in extents:
        if not extent.fits(degree):
            yield extent.problem(dim, degree, extents)
