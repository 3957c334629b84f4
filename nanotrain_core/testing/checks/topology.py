"""A topology arranges ranks so that every rank knows its place, and all derive the same table."""

from __future__ import annotations

from typing import Any

import attrs

from nanotrain_core.layout.layout import Layout
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check, distributed
from nanotrain_core.testing.pool import run_ranks

Table = dict[str, dict[int, tuple[int, ...]]]


def layout_of(case: Case, world_size: int) -> Layout:
    """Return the layout of ``world_size`` ranks."""
    layout: Layout = case.build().layout(world_size)
    return layout


def table_of(layout: Layout) -> Table:
    """Return, for each dimension, the group of every rank."""
    return {dim: {r: layout.ranks(r, dim) for r in range(layout.world_size)} for dim in layout.dims}


@check("topology", since="0.1")
def degrees_multiply_to_the_world(case: Case) -> None:
    """In every view the product of the degrees is the world size."""
    for name, view in layout_of(case, case.world_size).views.items():
        sizes = dict(zip(view.dims, view.sizes, strict=True))
        assert view.world_size == case.world_size, f"{name} view: {sizes} do not give {case.world_size} ranks"


@check("topology", since="0.1")
def groups_divide_the_world(case: Case) -> None:
    """The groups of a dimension are disjoint and cover the world: each rank is in one, its own."""
    layout = layout_of(case, case.world_size)
    for dim, groups in table_of(layout).items():
        for rank, group in groups.items():
            assert rank in group, f"rank {rank} is not in its own {dim} group {group}"
            assert len(group) == layout.size(dim), f"{dim} = {layout.size(dim)} but a group is {group}"
            others = {other: groups[other] for other in group if groups.get(other) != group}
            assert not others, f"rank {rank} has the {dim} group {group}, but {others}"


@check("topology", since="0.1")
def every_rank_has_its_own_place(case: Case) -> None:
    """No two ranks have the same coordinates in a view, and groups follow the coordinates' order."""
    layout = layout_of(case, case.world_size)
    for name, view in layout.views.items():
        places = {tuple(layout.coordinate(r, d) for d in view.dims) for r in range(case.world_size)}
        assert len(places) == case.world_size, (
            f"{name} view: {len(places)} places for {case.world_size} ranks"
        )
        for dim in view.dims:
            order = [layout.coordinate(r, dim) for r in layout.ranks(0, dim)]
            assert order == sorted(order), f"{dim} group {layout.ranks(0, dim)} has coordinates {order}"


@check("topology", since="0.1")
def world_that_does_not_fit_is_refused(case: Case) -> None:
    """Every world size is laid out in full or rejected with a ValueError that names the number."""
    for world_size in range(1, 2 * case.world_size + 2):
        try:
            layout = layout_of(case, world_size)
        except ValueError as error:
            refusal = str(error)
        else:
            assert layout.world_size == world_size, f"{world_size} ranks are laid out as {layout.world_size}"
            continue
        assert str(world_size) in refusal, f"the error for {world_size} ranks does not say so: {refusal}"


@check("topology", since="0.3")
def degrees_are_those_of_the_recipe(case: Case) -> None:
    """A dimension whose degree the config gives has that degree, in every world that is laid out."""
    settings = attrs.asdict(case.settings(), recurse=False)
    given = {name: value for name, value in settings.items() if type(value) is int}
    for world_size in range(1, 2 * case.world_size + 2):
        try:
            layout = layout_of(case, world_size)
        except ValueError:
            continue
        for dim in given.keys() & {*layout.dims}:
            assert layout.size(dim) == given[dim], (
                f"{dim} = {given[dim]}, but {world_size} ranks are laid out with {dim} = {layout.size(dim)}: "
                "expected a ValueError"
            )


@check("topology", since="0.2")
def coordinates_are_places_in_groups(case: Case) -> None:
    """A rank's coordinate is its place in its group, whose ranks ascend; all views are row-major grids.

    So it is in a world of eight times as many ranks, on paper.
    """
    for world_size in (case.world_size, 8 * case.world_size):
        _assert_grids(layout_of(case, world_size))


def _assert_grids(layout: Layout) -> None:
    for name, view in layout.views.items():
        for rank in range(layout.world_size):
            for dim in view.dims:
                group, place = layout.ranks(rank, dim), layout.coordinate(rank, dim)
                what = f"{name} view, {dim}: rank {rank}"
                assert list(group) == sorted(group), f"{what} is in the group {group}, which does not ascend"
                assert group[place] == rank, f"{what} has coordinate {place}, but its group is {group}"
                wanted = rank // view.stride(dim) % view.size(dim)
                assert place == wanted, f"{what} has coordinate {place}; in a row-major grid it is {wanted}"


@check("topology", since="0.2")
def views_fold_the_same_ranks(case: Case) -> None:
    """Views agree on dimensions that they share, and arrange the same ranks along their others."""
    layout = layout_of(case, case.world_size)
    views = [*layout.views.values()]
    shared = set(views[0].dims).intersection(*(view.dims for view in views))
    for rank in range(case.world_size):
        stages = {tuple(view.coordinate(rank, dim) for dim in sorted(shared)) for view in views}
        assert len(stages) == 1, f"rank {rank}: along {sorted(shared)} views have coordinates {stages}"
        folds = {view.ranks(rank, [d for d in view.dims if d not in shared]) for view in views}
        assert len(folds) == 1, f"rank {rank}: views fold different ranks, {folds}"


#: Dimensions along which the harness has a wrapper, a gradient sync or a schedule.
KNOWN = {"dp", "edp", "tp", "ep", "pp"}


def _above(case: Case) -> set[str]:
    """Return the dimensions with more than one rank, of all views; none of a layout that is refused."""
    try:
        views = layout_of(case, case.world_size).sizes.values()
    except ValueError:
        return set()
    return {dim for view in views for dim, size in view.items() if size > 1}


def _untrained(case: Case) -> str | None:
    """Return why the harness cannot train on the layout; None if it can."""
    above = _above(case)
    if not above:
        return None
    if unknown := sorted(above - KNOWN - {*layout_of(case, case.world_size).row_dims}):
        return f"the harness has no parallel wrapper for {', '.join(unknown)}"
    return "the harness has no parallel wrapper for tp and ep together" if {"tp", "ep"} <= above else None


@check("topology", since="0.2", applies=lambda case: bool(_above(case)), limit=_untrained)
def a_run_on_it_equals_one_process(case: Case) -> None:
    """Trained on this layout, a tiny model has the gradients and weights of one process, to 1e-10."""
    from nanotrain_core.testing.compare import assert_same, whole
    from nanotrain_core.testing.probe import train

    groups_divide_the_world(case)  # groups that overlap would hang
    layout = layout_of(case, case.world_size)
    above = {dim for dim in layout.dims if layout.size(dim) > 1}
    wrappers = [{"use": use} for dim, use in (("tp", "sliced"), ("ep", "spread")) if dim in above]
    model = {"use": "routed", "layers": 4} if "ep" in above else {"layers": 4}
    changes: dict[str, Any] = {"parallel": [*wrappers, {"use": "summed"}], "model": model}
    alone_in = {"model": model, "topology": {"use": "grid"}, "run": {"ranks": 1}}
    if "pp" in above:
        changes["schedule"] = {"use": "staged"}
    ranks = run_ranks(train, case.world_size, case, changes)
    (alone,) = run_ranks(train, 1, attrs.evolve(case, config={}).alone(), alone_in)
    for what in ("gradients", "weights"):
        assert_same(whole([getattr(t, what) for t in ranks]), whole([getattr(alone, what)]), what)


def sums_along_dimensions(case: Case) -> tuple[Table, dict[str, float]]:
    """Run on every rank: return its table, and the sum of rank numbers along each dimension."""
    import torch

    from nanotrain_core.layout.mesh import Mesh
    from nanotrain_core.testing.probe import rank

    layout = layout_of(case, case.world_size)
    mesh = Mesh(layout, rank=rank())
    sums = {}
    for dim in layout.dims:
        value = torch.tensor(float(rank()))
        mesh.all_reduce(value, dim)
        sums[dim] = value.item()
    return table_of(layout), sums


@check("topology", since="0.1", applies=distributed)
def groups_are_real(case: Case) -> None:
    """All ranks derive the same table, and a sum along each dimension adds up exactly its ranks."""
    groups_divide_the_world(case)  # groups that overlap would hang
    results = run_ranks(sums_along_dimensions, case.world_size, case)
    expected = results[0][0]
    for rank, (table, sums) in enumerate(results):
        assert table == expected, f"rank {rank} derives another table than rank 0"
        for dim, value in sums.items():
            group = expected[dim][rank]
            assert value == sum(group), f"rank {rank}: sum along {dim} is {value}, its group is {group}"


def groups_in_a_fake_world(case: Case, world_size: int, ranks: list[int]) -> list[Any]:
    """Run in one process: for each of ``ranks``, return the members of the groups it creates."""
    import torch.distributed as dist

    from nanotrain_core.layout.mesh import Mesh

    layout, found = layout_of(case, world_size), []
    for rank in ranks:
        dist.init_process_group("fake", rank=rank, world_size=world_size)
        mesh = Mesh(layout, rank=rank)
        groups = {dim: mesh.group(dim) for dim in layout.dims}
        members = {
            d: (rank,) if g is None else tuple(dist.get_process_group_ranks(g)) for d, g in groups.items()
        }
        found.append((members, {dim: mesh.ranks(dim) for dim in layout.dims}))
        dist.destroy_process_group()
    return found


@check("topology", since="0.1", variants=("64", "4096"))
def big_world_makes_the_same_groups(case: Case, size: str) -> None:
    """In a world of many ranks, simulated in one process, each rank creates the groups of the layout."""
    world_size = int(size) // case.world_size * case.world_size
    ranks = [0, world_size // 3, world_size - 1]
    (found,) = run_ranks(groups_in_a_fake_world, 1, case, world_size, ranks, backend=None)
    for rank, (members, expected) in zip(ranks, found, strict=True):
        assert members == expected, f"rank {rank} of {world_size} made {members}, the layout says {expected}"
