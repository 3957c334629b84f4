"""Lesson 4: tensor parallelism. Look at: a matrix cut by columns, then one by rows, and one sum.

    python docs/examples/learn/04_tensor_parallel.py

A feed-forward is down(f(up(x))). Cut ``up`` by its outputs (COLUMN): each rank has some of the hidden
numbers, all of x, and f needs no other rank. Cut ``down`` by its inputs (ROW), the same ones: each rank has
a *partial sum* of the result, and one all-reduce completes it. Backward is the mirror image: one all-
reduce, of the gradient of x. A model tags each layer with its role; the plugin ``tp`` shards by role.
Source: Megatron-LM, arXiv 1909.08053.
"""

import torch
import torch.nn.functional as F
from common import engine_of, largest_difference, same, train

from nanotrain_core.testing import run_ranks

TP = ['parallel=[{use="tp"}]', "topology.tp=2"]
SHOWN = ("layers.0.attn.q.weight", "layers.0.attn.o.weight", "layers.0.attn_norm.weight", "embed.weight")


def by_hand():
    """Compute a feed-forward whole, and in two halves that are added."""
    generator = torch.Generator().manual_seed(1)
    x_TD, up_FD, down_DF = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 8), (12, 8), (8, 12))
    )
    whole_TD = F.gelu(x_TD @ up_FD.T) @ down_DF.T
    halves = zip(up_FD.chunk(2, dim=0), down_DF.chunk(2, dim=1), strict=True)
    partial = [F.gelu(x_TD @ up.T) @ down.T for up, down in halves]
    return (sum(partial) - whole_TD).abs().max().item(), (partial[0] - whole_TD).abs().max().item()


def blocks():
    """Return what this rank holds of a few weights."""
    engine, _ = engine_of(TP)
    placed = {p.placement.name: p.placement for p in engine.run.placed}
    return {name: (placed[name].shape, placed[name].global_shape, placed[name].offset) for name in SHOWN}


def main():
    added, one = by_hand()
    print(f"a feed-forward in two halves: one alone is off by {one:.0f}; their sum is {same(added)}")
    first, second = run_ranks(blocks, 2)
    for name in SHOWN:
        (shape, whole, _), (_, _, offset) = first[name], second[name]
        print(f"{name:27} {list(whole)!s:8}: {list(shape)!s:8} on each rank, rank 1's from {list(offset)}")
    print("weights after 5 steps:", same(largest_difference(run_ranks(train, 2, TP), train([]))))


if __name__ == "__main__":
    main()
