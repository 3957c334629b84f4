"""Lesson 8: four dimensions at once. Look at: the coordinates of eight ranks, and that weights are equal.

    python docs/examples/learn/08_four_dimensions.py

pp 2 x dp 2 x tp 2, and the experts of each stage spread over ranks of tp and dp (ep 2). Each plugin changed
placements and nothing else: gradient synchronization reads from them over which dimensions a gradient is
*summed*.
"""

import importlib

from common import engine_of, largest_difference, same, train

from nanotrain_core.testing import run_ranks

MOE = importlib.import_module("06_experts").MOE
ALL = [
    *MOE,
    'parallel=[{use="tp"}, {use="ep_deepseek"}]',
    'optimizer={use="zero12", stage=2, lr=1e-2, weight_decay=0.0}',
    'schedule={use="1f1b"}',
    *(f"topology.{dim}=2" for dim in ("pp", "tp", "ep")),
]
LAYER = "layers.1.ffn."


def stand():
    """Return this rank's coordinates, and along which dimensions each of its gradients is summed."""
    engine, _ = engine_of(ALL)
    mesh = engine.run.mesh
    place = {dim: mesh.layout.coordinate(mesh.rank, dim) for dim in ("pp", "dp", "tp", "ep")}
    summed = {
        p.placement.name: sorted(dim for dim in p.placement.summed if mesh.size(dim) > 1)
        for p in engine.run.placed
    }
    return place, summed


def main():
    found = run_ranks(stand, 8)
    for rank, (place, summed) in enumerate(found):
        print(
            f"rank {rank}: "
            + " ".join(f"{dim} {at}" for dim, at in place.items())
            + f", {len(summed)} weights"
        )
    last = found[-1][1]
    norm = next(name for name in last if name.endswith("attn_norm.weight"))
    expert = next(name for name in last if "expert" in name and "shared" not in name)
    for name in (norm, expert):
        print(f"{name}: gradient summed along {', '.join(last[name]) or 'nothing'}")
    print("weights after 5 steps:", same(largest_difference(run_ranks(train, 8, ALL), train(MOE))))


if __name__ == "__main__":
    main()
