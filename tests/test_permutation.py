"""Rows on their way to experts and back have the values and gradients of plain indexing."""

import pytest
import torch
from nanotrain_core.moe.permutation import combine, inverted, spread

from nanotrain_core.moe.routing import sort_by_expert


@pytest.mark.parametrize(("tokens", "chosen"), [(0, 2), (1, 1), (7, 3), (64, 8)])
def test_values_and_gradients(tokens, chosen):
    generator = torch.Generator().manual_seed(tokens)
    experts = torch.stack([torch.randperm(9, generator=generator)[:chosen] for _ in range(max(1, tokens))])[
        :tokens
    ]
    order, counts = sort_by_expert(experts, 9)
    x, weights = (torch.rand(tokens, n, dtype=torch.float64, generator=generator) for n in (5, chosen))
    factor = torch.rand(5, dtype=torch.float64, generator=generator)

    def ours(x, weights):
        rows = spread(x, order, inverted(order), chosen)
        return combine((rows * factor).sin(), order, inverted(order), weights)

    def plain(x, weights):
        rows = x.repeat_interleave(chosen, 0)[order]
        outputs = torch.zeros_like(rows).index_copy(0, order, (rows * factor).sin())
        return (outputs.view(tokens, chosen, 5) * weights.unsqueeze(2)).sum(1)

    results = []
    for way in (ours, plain):
        inputs = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        y = way(*inputs)
        y.square().sum().backward()
        results.append([y, *(each.grad for each in inputs)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    assert counts.sum() == tokens * chosen
