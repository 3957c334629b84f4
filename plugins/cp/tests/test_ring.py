"""Ring attention against attention of one process, what steps compute, and how many blocks a rank has."""

import weakref
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from nanotrain_cp import blocks
from nanotrain_cp.collectives import Ranks
from nanotrain_cp.ring import Ring, attend

from nanotrain_core.api import NanotrainError, RecipeError
from nanotrain_core.api.torch import GlooExchange, attention, shard_range
from nanotrain_core.testing import Case, run_ranks

CPU = torch.device("cpu")

#: Length, query heads, key heads, sizes of a key and of a value, whether documents share sequences.
SHAPES = {
    "even": (16, 4, 4, 8, 8, False),
    "grouped heads": (13, 4, 2, 5, 5, False),
    "one key head, documents": (13, 4, 1, 8, 8, True),
    "smaller values": (9, 2, 2, 6, 4, False),
    "larger values, documents": (17, 4, 2, 4, 6, True),
    "parts of one token": (4, 4, 2, 8, 8, False),
    "parts of one token, documents": (4, 4, 2, 8, 8, True),
}


def ranks_of(size, index, exchange=None):
    """Return the ranks of a mesh with ``cp`` alone."""
    sizes = {"size": lambda dim: size, "coordinate": lambda dim: index}
    return Ranks(SimpleNamespace(**sizes, exchange=lambda dim: exchange or object()))


def world(exchange=GlooExchange):
    return ranks_of(dist.get_world_size(), dist.get_rank(), exchange(dist.group.WORLD, CPU))


def leaves_of(*shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.to(dtype).requires_grad_() for x in made]


def largest_errors(fused):
    """Return by how much output and gradients of this rank's part are off, for every shape."""
    has_flash, rows = blocks.has_flash, blocks.ROWS
    if not fused:
        blocks.has_flash, blocks.ROWS = (lambda q, v: False), 3
    try:
        return {name: error_of(*shape) for name, shape in SHAPES.items()}
    finally:
        blocks.has_flash, blocks.ROWS = has_flash, rows


def error_of(S, H, G, K, V, documents):
    *given, d_y = leaves_of((2, S, H, K), (2, S, G, K), (2, S, G, V), (2, S, H, V))
    begins = None
    if documents:
        begins = torch.zeros(2, S, dtype=torch.int64)
        begins[0, S // 3 :], begins[1, 1:] = S // 3, 1
        begins[0, S // 2 :] = S // 2
    ranks = world()
    own = slice(*shard_range(S, ranks.index, ranks.size))
    parts = [x[:, own].detach().requires_grad_() for x in given]
    whole, part = attention(*given, 0.3, begins), attend(ranks, S, attention, *parts, 0.3, begins)
    wanted, found = torch.autograd.grad(whole, given, d_y), torch.autograd.grad(part, parts, d_y[:, own])
    pairs = zip((whole, *wanted), (part, *found), strict=True)
    return max((a[:, own] - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize(
    ("ranks", "fused"),
    [
        (3, True),
        *(pytest.param(n, fused, marks=pytest.mark.full) for n in (2, 4) for fused in (True, False)),
        pytest.param(3, False, marks=pytest.mark.full),
    ],
)
def test_output_and_gradients_are_those_of_one_process(ranks, fused):
    """With torch's flash operators where there are no documents, and by hand, a few queries at a time."""
    for errors in run_ranks(largest_errors, ranks, fused):
        assert {name for name, error in errors.items() if not error < 1e-13} == set()


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_each_score_of_the_causal_mask_is_computed_once_and_as_many_in_each_step(size):
    for length in (size, 2 * size + 1, 4 * size):
        computed = Counter()
        for step in range(size):
            scores = set()
            for index in range(size):
                ring = Ring(ranks_of(size, index), length, 1.0, None)
                queries, keys, _ = ring.seen(step, CPU)
                own, block = ([*a, *b] for a, b in (ring.chunks(index), ring.chunks(ring.source(step))))
                pairs = [(q, k) for q in own[queries] for k in block[keys] if step or k <= q]
                scores.add(len(pairs))
                computed.update(pairs)
            assert length % (2 * size) or len(scores) == 1
        assert computed == Counter((q, k) for q in range(length) for k in range(q + 1))


class Counting(GlooExchange):
    """Counts the tensors alive of what it has sent and received, by dtype, whenever it begins to send."""

    def __init__(self, *args):
        super().__init__(*args)
        self.known, self.most = [], Counter()

    def shift(self, received, sent):
        self.known += [weakref.ref(received), weakref.ref(sent)]
        alive = {id(x): x.dtype for each in self.known if (x := each()) is not None}
        self.most |= Counter(alive.values())
        return super().shift(received, sent)


def most_blocks():
    """Return how many blocks this rank has at once, of keys in bfloat16 and of their gradients in float32."""
    ranks, S = world(Counting), 16
    shapes = (1, S // ranks.size, 2, 8), *[(1, S // ranks.size, 1, 8)] * 2
    parts = leaves_of(*shapes, dtype=torch.bfloat16)
    attend(ranks, S, attention, *parts).float().sum().backward()
    return ranks.exchange.most[torch.bfloat16], ranks.exchange.most[torch.float32]


def test_a_rank_has_its_own_block_and_never_more_than_two_others():
    """The own one is kept for backward, in which the gradients of two are there, too."""
    assert run_ranks(most_blocks, 4) == [(3, 2)] * 4


def test_a_sliding_window_is_refused():
    q, k, v = leaves_of((1, 4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8))
    with pytest.raises(NanotrainError, match="has no sliding window"):
        attend(ranks_of(2, 0), 8, attention, q, k, v, None, None, 4)


SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "window": 15}


def recipe_of(communication, length, **changes):
    wrappers = [{"use": "cp", "communication": communication}, {"use": "ddp"}]
    overrides = {"parallel": wrappers, "batch": {"length": length}}
    case = {"config": SLIDING | changes, "topology": {"cp": 2}, "overrides": overrides}
    return Case("model", use="transformer", **case).recipe()


def test_a_window_smaller_than_a_sequence_is_refused_before_ranks_start():
    with pytest.raises(RecipeError, match=r"parallel\.0\.communication: .*no sliding window"):
        recipe_of("ring", 16)
    recipe_of("all_gather", 16)
    recipe_of("ring", 16, layer_types=["full_attention"])
    recipe_of("ring", 15)  # it hides nothing there
