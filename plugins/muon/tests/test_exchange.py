"""How matrices are divided among ranks: evenly, and with whom who holds most of them if possible."""

import doctest
import weakref

import pytest
import torch
from nanotrain_muon import exchange
from nanotrain_muon.exchange import assign, rounds_of, stacks_of
from nanotrain_muon.matrices import Matrix, Part, parts_of
from nanotrain_muon.newton_schulz import flops

from nanotrain_core.api.torch import Piece, Placement
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_run


def test_the_examples_are_true():
    assert doctest.testmod(exchange).failed == 0


def test_equal_matrices_are_divided_evenly():
    matrices = [Matrix(f"layers.{layer}.w", 0) for layer in range(12)]
    held = [dict.fromkeys(matrices, 4) for _ in range(4)]
    owners, loads = assign(dict.fromkeys(matrices, 100), held)
    assert loads == [300] * 4
    assert sorted(owners) == sorted(matrices)


def test_matrices_stay_where_they_lie_if_that_is_even():
    matrices = [Matrix(f"layers.{layer}.w", 0) for layer in range(8)]
    held = [dict.fromkeys(matrices[first::4], 16) for first in range(4)]
    owners, loads = assign(dict.fromkeys(matrices, 7), held)
    assert owners == {matrix: number % 4 for number, matrix in enumerate(matrices)}
    assert loads == [14] * 4


def test_no_rank_has_much_more_than_its_share():
    """Of a Llama's layers: of two sorts, one with seven times the work of another."""
    shapes = {"q": (4096, 4096), "k": (1024, 4096), "gate": (14336, 4096), "down": (4096, 14336)}
    work = {
        Matrix(f"layers.{layer}.{name}", 0): flops(*shape)
        for layer in range(32)
        for name, shape in shapes.items()
    }
    held = [dict.fromkeys(work, 1) for _ in range(8)]
    _, loads = assign(work, held)
    assert max(loads) < 1.02 * sum(loads) / len(loads)


def test_a_rank_that_holds_all_does_not_compute_all():
    matrices = [Matrix(f"w{number}", 0) for number in range(6)]
    _, loads = assign(dict.fromkeys(matrices, 5), [dict.fromkeys(matrices, 9), {}, {}])
    assert loads == [10, 10, 10]


def test_matrices_and_transposed_ones_are_stacked():
    shapes = {"up": (8, 4), "gate": (8, 4), "down": (4, 8), "q": (4, 4), "experts": (2, 8, 4)}
    matrices = [Matrix(name, 0) for name in shapes] + [Matrix("experts", 1)]
    stacks = stacks_of(matrices, shapes, "original")
    assert [(stack.shape, len(stack.matrices)) for stack in stacks] == [((4, 8), 5), ((4, 4), 1)]
    assert stacks[0].tall == [True, True, False, True, True]
    assert stacks[0].scales[:3] == pytest.approx([2**0.5, 2**0.5, 1.0])


def test_rounds_are_limited_and_of_like_shapes(monkeypatch):
    monkeypatch.setattr(exchange, "ROUND", 100)
    shapes = {"a": (4, 8), "b": (8, 8), "c": (8, 4), "d": (20, 20)}
    found = rounds_of([Matrix(name, 0) for name in shapes], shapes)
    assert [[matrix.name for matrix in each] for each in found] == [["a", "c"], ["b"], ["d"]]


def placed(shape, at, block, **more):
    return Placement("w", shape, block, at, **more)


def test_parts_of_a_range_are_those_of_each_expert():
    """Elements 5 to 27 of two experts [3, 4], the second and third of three."""
    piece = Piece(None, placed((3, 3, 4), (1, 0, 0), (2, 3, 4)), (5, 24))
    assert parts_of([piece]) == [
        Part(Matrix("w", 1), (1, 1, 1, 3), 0, 0, None),
        Part(Matrix("w", 1), (2, 0, 1, 4), 0, 3, None),
        Part(Matrix("w", 2), (0, 0, 3, 4), 0, 7, None),
    ]


def test_parts_of_a_block_are_views_of_each_expert():
    piece = Piece(None, placed((3, 3, 8), (1, 0, 4), (2, 3, 4)))
    assert parts_of([piece]) == [
        Part(Matrix("w", 1), (0, 4, 3, 4), 0, None, 0),
        Part(Matrix("w", 2), (0, 4, 3, 4), 0, None, 1),
    ]


def work_of(case):
    """Return the FLOPs of each rank, by the dimensions along which they exchange matrices."""
    optimizer = make_run(case, {}).optimizer
    found = getattr(optimizer, "behind", optimizer).orthogonalizer.flops  # behind a gradient sync that shards
    return {span.dims: loads for span, loads in found.items()}


def test_replicas_repeat_the_work_unless_they_are_to_share_it():
    summed = {"parallel": [{"use": "summed"}]}
    (alone,) = run_ranks(work_of, 1, Case("optimizer", use="muon"))
    assert [*alone] == [()]
    total = alone[()][0]
    plain = Case("optimizer", use="muon", topology={"dp": 2}, overrides=summed)
    assert run_ranks(work_of, 2, plain) == [{(): [total]}] * 2
    sharing = Case(
        "optimizer", use="muon", config={"share_replicas": True}, topology={"dp": 2}, overrides=summed
    )
    one, other = run_ranks(work_of, 2, sharing)
    assert one == other
    assert [*one] == [("dp",)]
    assert sum(one["dp",]) == total
    assert max(one["dp",]) < 0.55 * total


def test_ranks_of_ranges_divide_the_work():
    ranged = Case("optimizer", use="muon", topology={"dp": 2}, overrides={"parallel": [{"use": "ranged"}]})
    (alone,) = run_ranks(work_of, 1, Case("optimizer", use="muon"))
    for found in run_ranks(work_of, 2, ranged):
        assert [*found] == [("dp",)]
        assert sum(found["dp",]) == alone[()][0]
        assert max(found["dp",]) < 0.6 * alone[()][0]


def messages_alive(case):
    """Return the bytes of messages that are alive whenever matrices are orthogonalized."""
    optimizer = make_run(case, {}).optimizer.behind  # of what gathers weights
    weights = [shard.weight for shard in optimizer.master_shards if shard.group["muon"]]
    buffers, found = [], []
    buffer, orthogonalize = exchange.Messages.buffer, exchange.orthogonalize

    def noted(self, like):
        flat, parts = buffer(self, like)
        buffers.append(weakref.ref(flat))
        return flat, parts

    def looked(stack, steps):
        found.append(sum(flat().nbytes for flat in buffers if flat() is not None))
        return orthogonalize(stack, steps)

    exchange.Messages.buffer, exchange.orthogonalize = noted, looked
    try:
        optimizer.orthogonalizer([torch.ones_like(weight) for weight in weights])
    finally:
        exchange.Messages.buffer, exchange.orthogonalize = buffer, orthogonalize
    return len(buffers), found


def test_messages_that_have_arrived_are_freed_before_matrices_are_orthogonalized():
    ranged = Case("optimizer", use="muon", topology={"dp": 2}, overrides={"parallel": [{"use": "ranged"}]})
    for buffers, alive in run_ranks(messages_alive, 2, ranged):
        assert buffers == 4  # sent and received, there and back
        assert alive
        assert not any(alive)


def test_tensors_that_lie_alike_are_copied_in_one_call_whatever_others_do(monkeypatch):
    calls = []
    copy = torch._foreach_copy_

    def counted(into, tensors):
        calls.append([to.stride() == x.stride() for to, x in zip(into, tensors, strict=True)])
        copy(into, tensors)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    tensors = [torch.randn(4, 6), torch.randn(6, 4).mT, torch.randn(4, 6)]
    into = [torch.zeros(4, 6, dtype=torch.bfloat16) for _ in tensors]
    exchange.copy(into, tensors)
    assert calls == [[True, True], [False]]
    assert all(torch.equal(to, x.bfloat16()) for to, x in zip(into, tensors, strict=True))
    exchange.copy([], [])
    assert len(calls) == 2
