"""Lesson 7: optimizer-state sharding (ZeRO). Look at: AdamW's state is 8 bytes a parameter, then 8 / N.

    python docs/examples/learn/07_optimizer_state_sharding.py

Data-parallel ranks all hold the same two moments. ZeRO-1 has each rank keep and update 1 / N of them:
gradients are reduce-scattered, and updated weights gathered. ZeRO-2 also keeps no more of the gradients
than that part. P parameters in float32 take 4P bytes of weights, 4P of gradients and 8P of state. Source:
arXiv 1910.02054.
"""

from common import engine_of, largest_difference, same, train

from nanotrain_core.testing import run_ranks

FP32 = ['precision={use="fp32"}']
OPTIMIZERS = {
    "adamw with ddp": ['parallel=[{use="ddp"}]'],
    "zero12, stage 1": ['optimizer={use="zero12", stage=1, lr=1e-2, weight_decay=0.0}'],
    "zero12, stage 2": ['optimizer={use="zero12", stage=2, lr=1e-2, weight_decay=0.0}'],
}


def state_bytes(overrides):
    """Train a step; return this rank's bytes of optimizer state, and how many parameters the model has."""
    engine, _ = engine_of([*FP32, *overrides, "run.steps=1"])
    engine.fit()
    moments = [block.tensor for block in engine.run.optimizer.blocks() if block.name.startswith("exp_avg")]
    return sum(each.numel() * each.element_size() for each in moments), sum(
        p.parameter.numel() for p in engine.run.placed
    )


def main():
    for name, overrides in OPTIMIZERS.items():
        found = run_ranks(state_bytes, 4, overrides)
        parameters = found[0][1]
        sizes = [size for size, _ in found]
        most, mean = max(sizes) / parameters, sum(sizes) / 4 / parameters
        print(f"{name}: {most:.2f} bytes a parameter on a rank at most, {mean:.2f} in the mean")
    ranks = run_ranks(train, 4, OPTIMIZERS["zero12, stage 2"])
    print("weights after 5 steps of stage 2, in float64:", same(largest_difference(ranks, train([]))))


if __name__ == "__main__":
    main()
