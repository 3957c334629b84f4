"""Lesson 3: data parallelism. Look at: two ranks that see half a batch each end with one process's weights.

    python docs/examples/learn/03_data_parallel.py

Each rank has all weights and half of the sequences. Gradients are summed over ``dp`` before the update, so
that the copies stay equal. Placements describe this: the block of a parameter is the whole tensor, and along
``dp`` it is *summed* (replicas have partial gradients). Both ranks hold all optimizer state: see lesson 7.
"""

from common import engine_of, largest_difference, same, train

from nanotrain_core.testing import run_ranks

DDP = ['parallel=[{use="ddp"}]']


def describe():
    """Return a weight's placement, where it is summed, and how many gradients a step all-reduces."""
    engine, _ = engine_of(DDP)
    weight = next(p for p in engine.run.placed if p.placement.name == "layers.0.attn.q.weight")
    numbers = sum(p.parameter.numel() for p in engine.run.placed)
    return weight.placement, [d for d in weight.placement.summed if engine.run.mesh.size(d) > 1], numbers


def main():
    placement, summed, numbers = run_ranks(describe, 2)[0]
    print(f"{placement.name}: block {list(placement.shape)} of {list(placement.global_shape)}")
    print(f"summed along {', '.join(summed)}")
    print(f"each step all-reduces {numbers:,} gradients, {8 * numbers:,} bytes in float64")
    print("weights after 5 steps:", same(largest_difference(run_ranks(train, 2, DDP), train([]))))


if __name__ == "__main__":
    main()
