"""Replicas are compared bit for bit, and the rank that is alone with its bits is named."""

import pytest
import torch

from nanotrain_core.builtin.replicas import hash_bits, name_the_wrong
from nanotrain_core.errors import Corrupted
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_engine


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_any_flipped_bit_changes_the_hash(dtype):
    tensor = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    before, raw = hash_bits(tensor), tensor.view(torch.uint8).view(-1)
    assert hash_bits(tensor.clone()) == before
    for place in range(raw.numel()):
        for bit in range(8):
            raw[place] ^= 1 << bit
            assert hash_bits(tensor) != before, (place, bit)
            raw[place] ^= 1 << bit


def test_swapped_numbers_and_zeros_of_either_sign_change_the_hash():
    assert hash_bits(torch.tensor([1.0, 2.0])) != hash_bits(torch.tensor([2.0, 1.0]))
    assert hash_bits(torch.tensor([0.0])) != hash_bits(torch.tensor([-0.0]))


@pytest.mark.parametrize(
    ("hashes", "text"),
    [
        ((1, 1, 2), "w has other bits on rank 2 than on ranks 0, 1, which agree"),
        ((1, 2, 2, 2), "w has other bits on rank 0 than on ranks 1, 2, 3, which agree"),
        ((1, 2), "w has other bits on ranks 0, 1 each, and there is no majority to trust"),
    ],
)
def test_the_minority_is_named_where_there_is_one(hashes, text):
    assert name_the_wrong([{("w", (0,)): value} for value in hashes]) == text


def flip_and_train(case, culprit):
    engine = make_engine(case, {"monitor": [{"use": "replicas", "every": 2}]})
    if engine.run.mesh.rank == culprit:
        parameter = engine.run.placed[3].parameter
        parameter.data.view(torch.int64).view(-1)[5] ^= 1
    try:
        engine.fit()
    except Corrupted as found:
        return str(found)
    return None


@pytest.mark.parametrize("culprit", [0, 2])
def test_one_flipped_bit_stops_every_rank_with_the_name_of_the_wrong_one(culprit):
    case = Case("parallel", use="ddp", topology={"dp": 4})
    name = make_engine(case.alone(), {}).run.placed[3].placement.name
    others = ", ".join(str(rank) for rank in range(4) if rank != culprit)
    text = f"step 2: {name} has other bits on rank {culprit} than on ranks {others}, which agree"
    assert run_ranks(flip_and_train, 4, case, culprit) == [text] * 4


def test_blocks_that_differ_by_right_are_not_compared():
    case = Case("parallel", use="tp", topology={"tp": 2, "dp": 2}, overrides={"parallel": [{"use": "ddp"}]})
    assert run_ranks(flip_and_train, 4, case, -1) == [None] * 4
