"""The loss over a split vocabulary against torch's own over a whole one."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from nanotrain_tp.collectives import Ranks
from nanotrain_tp.head import Rows, split_cross_entropy

from nanotrain_core.batch import IGNORE
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import shard_range
from nanotrain_core.models.cross_entropy import Chunks, linear_cross_entropy
from nanotrain_core.models.ops import TORCH_OPS
from nanotrain_core.testing import RankFailure, run_ranks

TOKENS, WIDTH = 50, 12
VOCAB = 23
"""No number of ranks divides it."""


def whole():
    generator = torch.Generator().manual_seed(1)
    options = {"generator": generator, "dtype": torch.float64}
    hidden, weight = torch.randn(TOKENS, WIDTH, **options) * 3, torch.randn(VOCAB, WIDTH, **options)
    target = torch.randint(VOCAB, (TOKENS,), generator=generator)
    target[::7] = IGNORE
    return hidden, weight, target


def ranks():
    world = torch.distributed.get_world_size()
    rank = torch.distributed.get_rank()
    return Ranks(Mesh(Layout({"dense": View(("tp",), (world,))}), rank=rank))


def split(chunk, dtype=torch.float64, *, wrong=None):
    """Return loss without and with gradients, and this rank's gradients."""
    chunks = Chunks(logits=chunk * VOCAB, tokens=chunk)
    ops = replace(TORCH_OPS, linear_cross_entropy=partial(linear_cross_entropy, chunks=chunks))
    hidden, weight, target = whole()
    if wrong is not None:
        target[3] = wrong
    team = ranks()
    hidden = hidden.to(dtype).requires_grad_()
    first, end = shard_range(VOCAB, team.index, team.size)
    rows, part = Rows(first, VOCAB), weight[first:end].to(dtype).requires_grad_()
    with torch.no_grad():
        silent = split_cross_entropy(hidden, part, target, rows, team, ops)
    loss = split_cross_entropy(hidden, part, target, rows, team, ops)
    (loss * 0.25).backward()
    return silent, loss.detach(), hidden.grad, part.grad


@pytest.mark.parametrize(("world", "chunk"), [(2, 1000), (2, 7), (4, 16)])
def test_loss_and_gradients_equal_torchs(world, chunk):
    hidden, weight, target = whole()
    hidden.requires_grad_()
    weight.requires_grad_()
    expected = F.cross_entropy(hidden @ weight.T, target, ignore_index=IGNORE, reduction="sum")
    (expected * 0.25).backward()
    silent, losses, d_hidden, d_weight = zip(*run_ranks(split, world, chunk), strict=True)
    for loss in (*silent, *losses):
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    assert len({loss.item() for loss in losses}) == 1, "ranks must agree to the bit"
    torch.testing.assert_close(sum(d_hidden), hidden.grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat(d_weight), weight.grad, rtol=0, atol=1e-12)


def test_low_precision_sums_in_float32():
    hidden, weight, target = whole()
    logits = (hidden.bfloat16() @ weight.bfloat16().T).float()
    expected = F.cross_entropy(logits, target, ignore_index=IGNORE, reduction="sum")
    for silent, loss, d_hidden, _ in run_ranks(split, 2, 16, torch.bfloat16):
        assert loss.dtype == torch.float32
        assert d_hidden.dtype == torch.bfloat16
        torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
        torch.testing.assert_close(silent, expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("wrong", [VOCAB, -3])
def test_a_target_that_nobody_has_is_an_error(wrong):
    with pytest.raises(RankFailure, match=f"target {wrong} is not in the vocabulary of {VOCAB}"):
        run_ranks(split, 2, 16, wrong=wrong)
