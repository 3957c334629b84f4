"""A batch cut along its sequences: every part knows where it is, and what comes after it."""

import pytest
import torch

from nanotrain_core.batch import IGNORE, Batch
from nanotrain_core.errors import PluginError
from nanotrain_core.models.ops import TORCH_OPS, wrap_ops


def whole(sequences=3, length=7):
    tokens = torch.randint(50, (sequences, length + 1), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    targets[0, 2] = IGNORE
    return Batch(tokens[:, :-1].clone(), targets)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_parts_are_the_whole_and_count_its_targets_once(count):
    batch = whole()
    parts = [batch.part(index, count) for index in range(count)]
    assert torch.equal(torch.cat([part.tokens for part in parts], 1), batch.tokens)
    assert torch.equal(torch.cat([part.targets for part in parts], 1), batch.targets)
    assert sum(part.target_tokens() for part in parts) == batch.target_tokens()
    assert {part.length for part in parts} == {7}
    assert [part.start for part in parts] == [7 * index // count for index in range(count)]
    assert max(p.tokens.shape[1] for p in parts) - min(p.tokens.shape[1] for p in parts) <= 1


@pytest.mark.parametrize("depth", [1, 2, 5, 9])
def test_what_lies_further_on_may_be_in_the_next_part(depth):
    batch = whole()
    shifted = batch.shifted(depth)
    kept = max(0, 7 - depth)
    assert torch.equal(shifted.tokens[:, :kept], batch.tokens[:, depth:])
    assert torch.equal(shifted.targets[:, :kept], batch.targets[:, depth:])
    assert not shifted.tokens[:, kept:].any()
    assert (shifted.targets[:, kept:] == IGNORE).all()
    parts = [batch.part(index, 3).shifted(depth) for index in range(3)]
    assert torch.equal(torch.cat([part.tokens for part in parts], 1), shifted.tokens)
    assert torch.equal(torch.cat([part.targets for part in parts], 1), shifted.targets)


def test_microbatches_of_a_part_are_parts_of_microbatches():
    batch = whole()
    of_part, of_whole = [*batch.part(1, 2).split(2)], [each.part(1, 2) for each in batch.split(2)]
    for one, other in zip(of_part, of_whole, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.whole.targets, other.whole.targets)
        assert one.start == other.start == 3
        assert torch.equal(one.shifted(2).targets, other.shifted(2).targets)


def test_the_last_function_is_outermost_and_an_unknown_one_is_refused():
    order = []

    def stands(name):
        def outer(inner, *args):
            order.append(name)
            return inner(*args)

        return {"swiglu": outer}

    x = torch.ones(3)
    assert torch.equal(
        wrap_ops(TORCH_OPS, stands("first"), stands("last")).swiglu(x, x), TORCH_OPS.swiglu(x, x)
    )
    assert order == ["last", "first"]
    with pytest.raises(PluginError, match=r"models call no function 'atention' .did you mean 'attention'"):
        wrap_ops(TORCH_OPS, {"atention": max})
