"""The position of every rank along the named dimensions of a run. Pure arithmetic, no torch.

A layout has one or more *views* of the same ranks. The dense view (pp, dp, cp, tp) places
attention and dense weights; the expert view (pp, edp, ep, etp) arranges the ranks of each pipeline
stage a second time, for experts. A dimension belongs to every view that names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod

import attrs


@attrs.define(frozen=True)
class View:
    """One row-major grid over all ranks: the first dimension varies slowest.

    >>> View(("pp", "dp", "tp"), (2, 2, 2)).ranks(5, ["tp"])
    (4, 5)
    """

    dims: tuple[str, ...]
    """Names of the dimensions, the slowest first."""
    sizes: tuple[int, ...]
    """Ranks along each of them."""

    @property
    def world_size(self) -> int:
        """Return the number of all ranks."""
        return prod(self.sizes)

    def size(self, dim: str) -> int:
        """Return the number of ranks along ``dim``."""
        return self.sizes[self.dims.index(dim)]

    def stride(self, dim: str) -> int:
        """Distance in rank numbers between neighbors along ``dim``."""
        return prod(self.sizes[self.dims.index(dim) + 1 :])

    def coordinate(self, rank: int, dim: str) -> int:
        """Return the position of ``rank`` along ``dim``, from 0."""
        return rank // self.stride(dim) % self.size(dim)

    def ranks(self, rank: int, dims: Iterable[str]) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` only along ``dims``, ascending."""
        wanted = [dim for dim in self.dims if dim in set(dims)]
        origin = rank - sum(self.coordinate(rank, dim) * self.stride(dim) for dim in wanted)
        steps = [range(0, self.size(dim) * self.stride(dim), self.stride(dim)) for dim in wanted]
        return tuple(origin + sum(offsets) for offsets in product(*steps))


@attrs.define(frozen=True, order=True)
class Span:
    """Ranks that differ from one another along ``dims`` and, if there are any, among ``stages``."""

    dims: tuple[str, ...] = ()
    """Mesh dimensions of one view."""
    stages: tuple[int, ...] = ()
    """Coordinates along ``pp``, ascending; empty: the rank's own only."""

    def __bool__(self) -> bool:
        return bool(self.dims or self.stages)

    def __str__(self) -> str:
        stages = [f"pp{'&'.join(map(str, self.stages))}"] if self.stages else []
        return "+".join([*self.dims, *stages])


@attrs.define(frozen=True)
class Layout:
    """The views of one run."""

    views: dict[str, View]
    """By name: ``dense``, and others over the same ranks, such as ``expert``."""
    data_dims: tuple[str, ...] = ("dp",)
    """Dimensions of any view along which ranks see different tokens, so that gradients are partial."""
    sequence_dims: tuple[str, ...] = ()
    """The dense view's dimensions among these along which ranks have parts of the same sequences."""

    @property
    def world_size(self) -> int:
        """Return the number of all ranks."""
        return next(iter(self.views.values())).world_size

    @property
    def row_dims(self) -> tuple[str, ...]:
        """Dimensions along which ranks read different sequences: others read the same ones, or parts of them.

        In the dense view's order, so that a rank's coordinate along them is its place among their ranks.
        """
        rows = {*self.data_dims} - {*self.sequence_dims}
        return tuple(dim for dim in self.views["dense"].dims if dim in rows)

    @property
    def expert_dims(self) -> frozenset[str]:
        """Dimensions that the layout of experts has and the dense view has not; empty without experts."""
        dense = self.views["dense"]
        return frozenset(self.views.get("expert", dense).dims).difference(dense.dims)

    @property
    def sizes(self) -> dict[str, dict[str, int]]:
        """View -> dimension -> size."""
        return {name: dict(zip(view.dims, view.sizes, strict=True)) for name, view in self.views.items()}

    @property
    def degrees(self) -> dict[str, dict[str, int]]:
        """What distinguishes layouts: :attr:`sizes`, without dimensions of size 1."""
        return nontrivial_views(self.sizes)

    @property
    def dims(self) -> tuple[str, ...]:
        """Every dimension of every view, each once."""
        return tuple(dict.fromkeys(dim for view in self.views.values() for dim in view.dims))

    def view(self, dims: Sequence[str]) -> View:
        """Return a view that contains all of ``dims``.

        Raises:
            KeyError: no single view contains them all.
        """
        for view in self.views.values():
            if set(dims) <= set(view.dims):
                return view
        known = "; ".join(f"{name}: {', '.join(v.dims)}" for name, v in self.views.items())
        raise KeyError(f"no view of the layout has all of {list(dims)} (views are {known})")

    def size(self, *dims: str) -> int:
        """Return the number of ranks along ``dims`` combined, 1 for none.

        Raises:
            KeyError: no view of the layout has all of ``dims``. Not every topology has ``tp`` or ``cp``:
                :meth:`degree` accepts them nevertheless.
        """
        return prod(self.view(dims).size(dim) for dim in dims)

    def degree(self, *dims: str) -> int:
        """Return the product of the sizes of ``dims``; a dimension that the topology lacks has size 1."""
        return prod(self.size(dim) for dim in dims if dim in self.dims)

    def coordinate(self, rank: int, *dims: str) -> int:
        """Return the position of ``rank`` along ``dims`` combined, in their given order.

        Raises:
            KeyError: as in :meth:`size`.
        """
        view, position = self.view(dims), 0
        for dim in dims:
            position = position * view.size(dim) + view.coordinate(rank, dim)
        return position

    def ranks(self, rank: int, *dims: str) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` only along ``dims``, ascending.

        Raises:
            KeyError: as in :meth:`size`.
        """
        return self.view(dims).ranks(rank, dims)

    def some_member(self, rank: int, span: Span) -> int:
        """Return ``rank`` if it is in the span, otherwise its counterpart in the span's first stage."""
        view = self.view(span.dims)
        if not span.stages or view.coordinate(rank, "pp") in span.stages:
            return rank
        return rank + (span.stages[0] - view.coordinate(rank, "pp")) * view.stride("pp")

    def members(self, rank: int, span: Span) -> tuple[int, ...]:
        """Return the ranks of the span that ``rank`` belongs to, ascending.

        Empty if ``rank`` is in none of the span's stages.
        """
        view = self.view(span.dims)
        if not span.stages:
            return view.ranks(rank, span.dims)
        stage, stride = view.coordinate(rank, "pp"), view.stride("pp")
        if stage not in span.stages:
            return ()
        twins = (rank + (other - stage) * stride for other in span.stages)
        return tuple(member for twin in twins for member in view.ranks(twin, span.dims))


def nontrivial_views(views: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Return ``views`` without dimensions of size 1, and without views that have no others."""
    kept = {name: {dim: n for dim, n in sizes.items() if n > 1} for name, sizes in views.items()}
    return {name: sizes for name, sizes in kept.items() if sizes}
