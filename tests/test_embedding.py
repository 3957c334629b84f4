"""The gradient of an embedding table over several microbatches, against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from nanotrain_core.models.embedding import Embedding
from torch import nn


def tables():
    """Return ours and torch's, of the same float64 weights."""
    torch.manual_seed(0)
    ours, theirs = Embedding(50, 3).double(), nn.Embedding(50, 3).double()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def microbatches(count):
    """Yield tokens with many repeats, and what their rows are multiplied with."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        tokens = torch.randint(0, 9, (2, 20), generator=generator)
        yield tokens, torch.randn(2, 20, 3, dtype=torch.float64, generator=generator)


def loss(table, tokens, factors, *, tied):
    """Return a loss that reads the table once, or twice as a tied model does."""
    rows = table(tokens)
    total = (rows * factors).sum()
    return total + F.linear(rows, table.weight).square().sum() if tied else total


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_gradients_of_several_microbatches_add_up_as_torch_s(count, tied):
    ours, theirs = tables()
    for table in (ours, theirs):
        for tokens, factors in microbatches(count):
            loss(table, tokens, factors, tied=tied).backward()
    assert ours.weight.grad.layout == torch.strided
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-13, atol=1e-13)


def test_later_microbatches_add_to_the_memory_of_the_first_and_are_told_to_hooks():
    table, _ = tables()
    told = []
    table.weight.register_post_accumulate_grad_hook(lambda weight: told.append(weight.grad.data_ptr()))
    for tokens, factors in microbatches(3):
        loss(table, tokens, factors, tied=False).backward()
    assert told == [table.weight.grad.data_ptr()] * 3


def test_rows_of_no_token_are_left_alone_after_the_first_microbatch():
    table, _ = tables()
    (tokens, factors), (again, more) = microbatches(2)
    loss(table, tokens, factors, tied=False).backward()
    version = table.weight.grad._version
    table.weight.grad[10:] = -0.0  # 0.0 added to it would make it 0.0
    loss(table, again, more, tied=False).backward()
    assert table.weight.grad._version > version
    assert torch.signbit(table.weight.grad[10:]).all()


def test_a_sum_in_another_dtype_is_left_to_who_keeps_it():
    table, theirs = tables()
    table.bfloat16(), theirs.bfloat16()
    for tokens, factors in microbatches(2):
        for each in (table, theirs):
            each.weight.grad = None
            loss(each, tokens, factors.bfloat16(), tied=False).backward()
        assert torch.equal(table.weight.grad, theirs.weight.grad)
