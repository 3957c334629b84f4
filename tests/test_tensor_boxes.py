"""A range of a flattened tensor is the same elements, in the same order, as its boxes."""

from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanotrain_core.checkpoint.tensor_boxes import box_slices, boxes


@st.composite
def ranges(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    stop = draw(st.integers(0, prod(shape)))
    return shape, draw(st.integers(0, stop)), stop


@settings(deadline=None)
@given(ranges())
def test_boxes_hold_the_range_in_its_order(drawn):
    shape, start, stop = drawn
    tensor = torch.arange(prod(shape)).view(shape)
    found = [tensor[box_slices(*box)].flatten() for box in boxes(shape, start, stop)]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *found]).tolist() == list(range(start, stop))


@settings(deadline=None)
@given(ranges())
def test_boxes_are_few(drawn):
    shape, start, stop = drawn
    assert len(boxes(shape, start, stop)) <= max(1, 2 * len(shape) - 1)
