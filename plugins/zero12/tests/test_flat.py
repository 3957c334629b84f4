"""Buckets and ranges cover every element of every parameter exactly once, whatever the sizes."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nanotrain_zero12 import flat
from nanotrain_zero12.flat import ALIGN, Flat, cut
from torch import nn

from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.placement import RANGE, PlacedParameter, Placement

LAYOUT = Layout({"dense": View(("dp",), (1,))})


@given(st.integers(1, 10_000), st.integers(1, 3_000), st.integers(1, 9))
def test_buckets_follow_each_other_and_divide_by_ranks(total, limit, ranks):
    bounds = cut(total, limit, ranks)
    assert bounds[0][0] == 0
    assert [start for start, _ in bounds[1:]] == [stop for _, stop in bounds[:-1]]
    assert total <= bounds[-1][1] < total + ranks * ALIGN
    lengths = [stop - start for start, stop in bounds]
    assert all(length % (ranks * ALIGN) == 0 for length in lengths)
    assert max(lengths) <= max(limit, ranks * ALIGN)


def placed(shapes):
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    names = [f"p{number}" for number in range(len(shapes))]
    return [
        PlacedParameter(p, Placement.whole(name, p.shape, LAYOUT))
        for p, name in zip(parameters, names, strict=True)
    ]


def as_rank(members, rank, ranks, limit):
    """Return the buffer as one rank of several would make it, without process groups."""
    with mock.patch.multiple(flat.dist, get_rank=lambda _: rank, get_world_size=lambda _: ranks):
        return Flat(members, mock.sentinel.group, torch.float32, limit)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(64, 5_000),
)
def test_the_ranks_pieces_make_up_every_parameter(shapes, ranks, limit):
    members = placed(shapes)
    before = [member.parameter.detach().clone() for member in members]
    held = {member.parameter: torch.zeros(member.parameter.numel(), dtype=torch.int) for member in members}
    for rank in range(ranks):
        for piece, shard in as_rank(members, rank, ranks, limit).pieces():
            held[piece.parameter][slice(*piece.span)] += 1
            assert shard.shape == piece.weight.shape
            begin, end = piece.span
            assert begin % RANGE == 0
            assert end % RANGE == 0 or end == piece.parameter.numel()
    assert all((count == 1).all() for count in held.values())
    assert all(torch.equal(m.parameter, old) for m, old in zip(members, before, strict=True))


def test_parameters_and_pieces_are_views_of_one_buffer():
    members = placed([(30, 20), (7,), (50, 3)])
    buffer = as_rank(members, 1, 2, 1024)
    whole = buffer.weights.untyped_storage().data_ptr()
    assert all(m.parameter.untyped_storage().data_ptr() == whole for m in members)
    for piece, _ in buffer.pieces():
        piece.weight.fill_(9.0)
    for bucket in buffer.buckets:
        assert bucket.weights[bucket.own].count_nonzero() > 0
    assert members[1].parameter.eq(9.0).any() or members[0].parameter.eq(9.0).any()


@pytest.mark.parametrize("stop", [0, 1])
def test_the_end_of_the_last_bucket_is_zero(stop):
    members = placed([(31 + stop,)])
    assert as_rank(members, 0, 2, 1024).weights[31 + stop :].count_nonzero() == 0
