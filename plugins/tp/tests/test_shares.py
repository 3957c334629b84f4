"""Ranks need not get equal shares: of a vocabulary, of key heads and of the tokens of a sequence."""

import pytest
import torch

from nanotrain_core.batch import Batch
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.checks.parallel import gradients_equal
from nanotrain_core.testing.probe import make_run, placements

VOCAB = 67


def case(tp, *, sequence_parallel=True, **model):
    return Case(
        "parallel",
        use="tp",
        config={"sequence_parallel": sequence_parallel},
        topology={"tp": tp},
        overrides={"parallel": [{"use": "tp"}, {"use": "summed"}], "model": {"vocab": VOCAB, **model}},
    )


def blocks(case, name):
    """Return the placement of a parameter on every rank."""
    found = run_ranks(placements, case.world_size, case)
    return [{placement.name: placement for placement in rank}[name] for rank in found]


def test_rows_of_the_vocabulary_differ_by_one():
    rows = [(block.offset[0], block.shape[0]) for block in blocks(case(4), "embed.weight")]
    assert rows == [(0, 16), (16, 17), (33, 17), (50, 17)]


def test_ranks_that_use_one_key_head_all_keep_it_and_sum_its_gradient():
    for block in blocks(case(4, kv_heads=2), "layers.1.attn.k.weight"):
        assert block.shape == block.global_shape == (16, 32)
        assert "tp" in block.summed


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["shares", "whole"])
def test_key_heads_that_do_not_divide_are_repeated(sequence_parallel):
    """Of 6 query heads on 2 ranks, 0 to 2 read the key heads 0, 0 and 1, the others 1, 2 and 2."""
    shape = {"width": 24, "heads": 6, "kv_heads": 3, "bias": True}
    gradients_equal(case(2, sequence_parallel=sequence_parallel, **shape), "fp64")


@pytest.mark.full
@pytest.mark.parametrize(("tp", "heads", "kv_heads"), [(3, 6, 2), (4, 12, 3), (6, 12, 4), (3, 12, 4)])
def test_any_key_heads_that_divide_the_query_heads(tp, heads, kv_heads):
    shape = {"width": 48, "ffn": 96, "heads": heads, "kv_heads": kv_heads}
    gradients_equal(case(tp, **shape), "fp64")


@pytest.mark.parametrize(
    "sequence_parallel", [True, pytest.param(False, marks=pytest.mark.full)], ids=["shares", "whole"]
)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_gradients_are_those_of_one_process(kv_heads, sequence_parallel):
    options = {"kv_heads": kv_heads, "bias": True, "tied": kv_heads == 1}
    gradients_equal(case(4, sequence_parallel=sequence_parallel, **options), "fp64")


@torch.no_grad()
def logits(case):
    (part,) = make_run(case, {}).stages.values()
    tokens = torch.arange(VOCAB).remainder(64).repeat(2)[:32].view(2, 16)
    return part(tokens, Batch(tokens)).value


@pytest.mark.parametrize("tied", [True, False])
def test_without_targets_every_rank_has_the_logits_of_the_whole_vocabulary(tied):
    split = case(4, kv_heads=1, tied=tied)
    (alone,) = run_ranks(logits, 1, split.alone())
    assert alone.shape == (2, 16, VOCAB)
    for found in run_ranks(logits, 4, split):
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)
