"""Replicas are compared bit for bit, and the rank that is alone with its bits is named."""

import attrs
import pytest
import torch

from nanotrain_core.monitors.replicas import CHUNK, hash_bits, name_the_wrong
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.flipped import Flip, train_flipped
from nanotrain_core.testing.probe import train


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


def test_chunks_and_tensors_that_do_not_begin_or_end_with_a_word_are_hashed_whole(monkeypatch):
    """Their hash is that of the same bits elsewhere in memory."""
    monkeypatch.setitem(CHUNK, "cpu", 4)
    tensor = torch.randn(29, generator=torch.Generator().manual_seed(0))
    hashes = {hash_bits(tensor).item()}
    assert hashes == {hash_bits(torch.cat([tensor[:1], tensor])[1:]).item()}
    for place in range(len(tensor)):
        changed = tensor.clone()
        changed.view(torch.int32)[place] ^= 1
        hashes.add(hash_bits(changed).item())
    for first in range(0, 16, 8):  # a chunk is four words, eight of these numbers
        swapped = tensor.clone()
        swapped[first : first + 8], swapped[first + 8 : first + 16] = (
            tensor[first + 8 : first + 16],
            tensor[first : first + 8],
        )
        hashes.add(hash_bits(swapped).item())
    assert len(hashes) == 1 + len(tensor) + 2


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


# --- on several ranks -------------------------------------------------------------------------------

DDP = Case("parallel", use="ddp", topology={"dp": 4})
ZERO = Case("optimizer", use="zero12", config={"stage": 2, "bucket_mb": 0.01}, topology={"dp": 4})


def watched(every=1, **changes):
    return {"monitor": [{"use": "replicas", "every": every}], **changes}


def assert_named(found, step, culprit):
    """Every rank ends at ``step``, with the name of the rank that is alone with its bits."""
    name = found[culprit].flipped
    others = ", ".join(str(rank) for rank in range(len(found)) if rank != culprit)
    text = f"step {step}: {name} has other bits on rank {culprit} than on ranks {others}, which agree"
    assert name
    assert [each.text for each in found] == [text] * len(found)


@pytest.mark.full_cases("2")
@pytest.mark.parametrize("culprit", [0, 2])
def test_one_flipped_bit_stops_every_rank_with_the_name_of_the_wrong_one(culprit):
    found = run_ranks(train_flipped, 4, DDP, watched(3, run={"steps": 4}), Flip(1, culprit))
    assert_named(found, 3, culprit)


@pytest.mark.full_cases("ddp", "zero12")
@pytest.mark.parametrize("case", [DDP, ZERO], ids=lambda case: case.use)
def test_the_first_step_is_compared_whatever_the_interval(case, tmp_path):
    """What was initialized or restored is as much at risk as what was trained."""
    changes = watched(100, run={"steps": 4})
    assert_named(run_ranks(train_flipped, 4, case, changes, Flip(0, 1)), 1, 1)
    run_ranks(train, 4, case, changes, folder=tmp_path, save_at=2)
    assert_named(run_ranks(train_flipped, 4, case, changes, Flip(0, 3), folder=tmp_path, resume="2"), 3, 3)


@pytest.mark.full_cases("2-another's", "0-another's", "2-own")
@pytest.mark.parametrize("own", [True, False], ids=["own", "another's"])
@pytest.mark.parametrize("rank", [0, 2])
def test_nothing_is_saved_of_a_step_after_which_a_bit_flipped(tmp_path, rank, own):
    """The last update is followed by no other step that could notice."""
    changes = watched(100, run={"steps": 4}, checkpoint={"use": "simple", "every": 2})
    found = run_ranks(train_flipped, 4, ZERO, changes, Flip(4, rank, own=own), folder=tmp_path)
    assert_named(found, 4, rank)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002.safetensors"]


def test_weights_that_nobody_saves_are_compared_at_the_end():
    assert_named(run_ranks(train_flipped, 4, DDP, watched(100), Flip(3, 1)), 3, 1)


def test_steps_that_are_not_logged_are_compared():
    found = run_ranks(train_flipped, 4, ZERO, watched(run={"steps": 5, "log_every": 5}), Flip(2, 1))
    assert_named(found, 3, 1)


@pytest.mark.full_cases("fp16")
@pytest.mark.parametrize("use", ["bf16", "fp16"])
def test_a_flip_that_a_master_weight_would_overwrite_is_found(use):
    changes = watched(precision={"use": use})
    assert_named(run_ranks(train_flipped, 4, DDP, changes, Flip(1, 2)), 2, 2)


@pytest.mark.full_cases("zero12")
@pytest.mark.parametrize("case", [DDP, ZERO], ids=lambda case: case.use)
def test_a_flip_that_makes_the_gradient_infinite_is_named_before_the_step_is_skipped(case):
    """The top bit of an exponent: the weight becomes about 1e307."""
    assert_named(run_ranks(train_flipped, 4, case, watched(), Flip(1, 2, bit=62)), 2, 2)


def test_in_a_pipeline_all_stages_end():
    changes = watched(schedule={"use": "1f1b"})
    case = attrs.evolve(ZERO, topology={"pp": 2, "dp": 2})
    found = run_ranks(train_flipped, 4, case, changes, Flip(1, 3, own=False))
    name = found[3].flipped
    text = f"step 2: {name} has other bits on ranks 2, 3 each, and there is no majority to trust"
    assert [each.text for each in found] == [text] * 4


@pytest.mark.full
def test_blocks_that_differ_by_right_are_not_compared():
    case = Case("parallel", use="tp", topology={"tp": 2, "dp": 2}, overrides={"parallel": [{"use": "ddp"}]})
    found = run_ranks(train_flipped, 4, case, watched(), Flip(0, -1))
    assert [each.text for each in found] == [None] * 4


@pytest.mark.parametrize("strides", [(0,), (2,), (5,)])
@pytest.mark.parametrize("length", [0, 1, 3])
def test_the_hash_is_of_numbers_whatever_their_strides(length, strides):
    """As of a script's buffer that is a column, or one number of it."""
    tensor = torch.arange(12.0).as_strided((length,), strides, 1)
    assert hash_bits(tensor) == hash_bits(torch.tensor(tensor.tolist()))
