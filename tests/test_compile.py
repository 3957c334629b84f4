"""Each BLOCK and HEAD is one graph under ``torch.compile(fullgraph=True)``, with the eager run's numbers.

What is counted: every module gets a function of its own to compile, so dynamo may make exactly one graph for
each, and ``error_on_recompile`` makes a second one an error, in two steps of two microbatches. Numbers are
compared bit by bit in float64. In bfloat16 AOTAutograd decomposes some functions otherwise than torch
computes them, and rounds in other places.
"""

import pytest
import torch
from compiled import Cell, compare

from nanotrain_core.moe.grouped_mm import grouped_mm, grouped_mm_transposed
from nanotrain_core.testing import run_ranks

BLOCKS_AND_HEADS = {"llama": 2, "gpt": 2, "deepseek": 3}

#: What every change must pass.
TABLE = (
    *(
        Cell(model, precision, tp)
        for model in ("llama", "deepseek")
        for precision in ("fp64", "bf16")
        for tp in ("", "sp", "whole")
    ),
    Cell("gpt", "fp64", "sp"),
    Cell("deepseek", "fp64", recompute="around"),
)

MORE = (
    *(Cell(model, "fp64", tp, length=7) for model in ("llama", "deepseek") for tp in ("sp", "whole")),
    Cell("llama", "fp64", "sp", recompute="inside"),
    *(Cell("gpt", precision, tp) for precision in ("fp64", "bf16") for tp in ("", "whole")),
    *(
        Cell(model, "fp64", tp, recompute=how, overlap=tp != "")
        for model in ("llama", "deepseek")
        for tp in ("", "sp", "whole")
        for how in ("", "inside", "around")
        if how or tp
    ),
)


def check(cell):
    for rank, found in enumerate(run_ranks(compare, cell.ranks, cell, timeout=300)):
        assert len(found.compiled) == len(found.graphs) == BLOCKS_AND_HEADS[cell.model], f"rank {rank}"
        assert all(bool(graph) == (cell.ranks > 1) for graph in found.graphs), f"rank {rank}: {found.graphs}"
        eager, compiled = found.losses
        if cell.precision == "fp64":
            assert found.differing == [], f"rank {rank}"
            assert compiled == eager
        else:
            assert found.furthest < 0.01, f"rank {rank}: {found.differing}"
            assert compiled == pytest.approx(eager, rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("cell", TABLE, ids=lambda cell: cell.id)
def test_one_graph_each_and_the_eager_numbers(cell):
    check(cell)


@pytest.mark.full
@pytest.mark.parametrize("cell", MORE, ids=lambda cell: cell.id)
def test_one_graph_each_in_every_variant(cell):
    check(cell)


@pytest.mark.full
@pytest.mark.parametrize(
    ("tp", "expected"),
    [("sp", {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 4}), ("whole", {"all_reduce": 4})],
)
def test_what_several_layers_read_enters_once(tp, expected):
    """Queries, keys and values in one collective, gate and up in another, each with its conjugate."""
    (found, _) = run_ranks(compare, 2, Cell("llama", "fp64", tp), timeout=300)
    block = found.graphs[0]
    assert block == expected


@pytest.mark.parametrize("counts", [(3, 0, 4), (0, 0, 0)])
def test_operators_of_experts_are_what_torch_expects_of_operators(counts):
    rows, right = torch.randn(sum(counts), 5, dtype=torch.float64), torch.randn(3, 5, 2, dtype=torch.float64)
    arguments = (rows.requires_grad_(), right.requires_grad_(), torch.tensor(counts))
    torch.library.opcheck(grouped_mm, arguments)
    torch.library.opcheck(
        grouped_mm_transposed, (torch.randn(sum(counts), 2), torch.randn(sum(counts), 5), arguments[2])
    )
    expected = torch.cat([own @ each for own, each in zip(rows.split(counts), right, strict=True)])
    weight = torch.randn_like(expected)
    want = torch.autograd.grad(expected, (rows, right), weight)
    got = torch.autograd.grad(grouped_mm(*arguments), (rows, right), weight)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
