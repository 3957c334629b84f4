"""Packed weights as ``fully_shard`` cuts, pads and gathers them: whole stored rows, bit for bit."""

import pytest
import torch
from nanotrain_fsdp.packed import PackedShard, cut_in_rows, let_shard
from torch import nn

from nanotrain_core.precision.quantized_storage import PackedWeight, dequantize, storage_of


class Bytes:
    """Integers from 0 to 255."""

    name, width = "bytes", 64

    def rounded(self, numbers):
        return numbers.round().clamp(0, 255)

    def pack(self, numbers_n):
        rows = numbers_n.new_zeros(-(-len(numbers_n) // 64) * 64, dtype=torch.uint8)
        rows[: len(numbers_n)] = numbers_n.to(torch.uint8)
        return rows.view(-1, 64)

    def unpack(self, rows_UW):
        return rows_UW.flatten().bfloat16()


def numbers(rows, columns):
    return torch.arange(rows * columns).remainder(251).view(rows, columns).bfloat16()


class Layer(nn.Module):
    """A packed weight that is frozen, and one that is trained."""

    def __init__(self, rows=10, columns=32):
        super().__init__()
        packed = PackedWeight.of(numbers(rows, columns), Bytes(), trained=False)
        self.frozen = nn.Parameter(packed, requires_grad=False)
        self.trained = nn.Parameter(PackedWeight.of(numbers(4, 64), Bytes()))
        let_shard(self)


def test_frozen_weights_become_shards_and_trained_ones_stay():
    layer = Layer()
    assert isinstance(layer.frozen, PackedShard)
    assert not layer.frozen.requires_grad
    assert not isinstance(layer.trained, PackedShard)
    assert torch.equal(dequantize(layer.frozen), numbers(10, 32))


@torch.no_grad()
def test_a_shard_is_cut_and_padded_as_torch_does_it():
    """Of 10 rows on 3 ranks, 4, 4 and 2; the memory that was taken for the last is still its own."""
    weight = Layer().frozen
    chunks = torch.chunk(weight, 3)
    assert [each.shape for each in chunks] == [(4, 32), (4, 32), (2, 32)]
    assert torch.equal(torch.cat([dequantize(each) for each in chunks]), numbers(10, 32))
    padded = chunks[2].detach().new_zeros(4, 32)
    padded.narrow(0, 0, 2).copy_(chunks[2])
    last = padded.narrow(0, 0, 2)
    assert torch.equal(dequantize(last), numbers(10, 32)[8:])
    again = last.new_zeros(4, 32)
    again.narrow(0, 0, 2).copy_(last)
    assert storage_of(again).data_ptr() == storage_of(last).data_ptr()
    (sent,), _ = last.fsdp_pre_all_gather(None)
    assert sent.shape == (2, 64)
    assert torch.equal(sent[:1], storage_of(last))
    assert torch.equal(dequantize(last), numbers(10, 32)[8:])


@torch.no_grad()
def test_what_ranks_send_is_the_whole_weight_with_its_bits():
    weight = Layer().frozen
    shards = [torch.chunk(weight, 3)[n].new_zeros(4, 32) for n in range(3)]
    for shard, chunk in zip(shards, torch.chunk(weight, 3), strict=True):
        shard.narrow(0, 0, len(chunk)).copy_(chunk)
    gathered = torch.cat([each.narrow(0, 0, 2).fsdp_pre_all_gather(None)[0][0] for each in shards])
    found, inner = shards[0].fsdp_post_all_gather((gathered,), None, torch.bfloat16)
    whole = torch.as_strided(found, (10, 32), (32, 1), 0)
    assert inner == ()
    assert isinstance(whole, PackedWeight)
    assert torch.equal(storage_of(whole), storage_of(weight))
    assert storage_of(whole).data_ptr() == gathered.data_ptr()


@pytest.mark.parametrize(
    ("look", "why"),
    [
        (lambda w: w[:3], "ends within a stored row"),
        (lambda w: w.T, "is not contiguous"),
        (lambda w: w[0], "is half a stored row"),
    ],
)
def test_other_views_are_refused(look, why):
    with torch.no_grad(), pytest.raises(NotImplementedError, match="dequantize"):
        look(Layer().frozen)


@pytest.mark.parametrize(
    ("rows", "columns", "ranks", "cut"),
    [
        (128, 64, 2, True),
        (10, 64, 4, True),  # 3, 3, 3 and 1
        (4, 64, 3, False),  # 2, 2 and none
        (128, 16, 4, True),
        (128, 16, 3, False),  # 43 rows are 10.75 stored ones
        (7, 32, 2, False),  # the whole ends within one
    ],
)
def test_a_weight_is_cut_if_each_rank_gets_whole_stored_rows(rows, columns, ranks, cut):
    assert cut_in_rows(torch.empty(rows, columns), ranks) == cut
