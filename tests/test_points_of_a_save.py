"""Saves of few writes are interrupted at each of them; of those of many, beginning and end are."""

from pathlib import Path

import pytest

from nanotrain_core.testing.points import EACH, OF_A_KIND, of_each_kind, up_to_the_end


@pytest.mark.parametrize("writes", [1, 7, EACH - 1, EACH, EACH + 1, EACH + 9, 2 * EACH, 301, 5000])
def test_the_first_and_the_last_writes_are_tried_and_the_end(writes):
    tried = []
    up_to_the_end(lambda number: tried.append(number) or number > writes)
    assert len(tried) == len(set(tried)) <= 2 * EACH
    assert set(range(1, min(EACH, writes + 1) + 1)) <= set(tried)
    assert set(range(max(1, writes - EACH // 2 + 2), writes + 2)) <= set(tried)


def test_of_many_files_of_a_kind_some_are_damaged_and_every_kind_is():
    tensors = [Path(f"step/{number:03}.npy") for number in range(90)]
    chosen = of_each_kind([Path("step/COMMITTED"), Path("step/index.json"), *tensors])
    assert chosen[:3] == [Path("step/COMMITTED"), Path("step/index.json"), tensors[0]]
    assert (chosen[-1], len(chosen)) == (tensors[-1], 2 + OF_A_KIND)


@pytest.mark.parametrize("count", [0, 1, 2, OF_A_KIND])
def test_few_files_are_all_damaged(count):
    few = [Path(f"rank-{number}.safetensors") for number in range(count)]
    assert of_each_kind(few) == few
