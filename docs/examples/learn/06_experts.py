"""Lesson 6: experts. Look at: a few experts get most tokens, and a bias that follows the load evens it out.

    python docs/examples/learn/06_experts.py

A router sends each token to two of eight experts. Experts that are chosen learn, and are chosen more often.
DeepSeek-V3 adds a bias to each expert's score *for the choice only*, and after each step lowers it where the
load was above the mean and raises it where it was below: this needs no loss term. With ``ep`` the experts
are on different ranks, and all-to-alls send rows to them and back. Source: arXiv 2412.19437, section
2.1.2.
"""

from common import engine_of, largest_difference, same, train

from nanotrain_core.api.torch import Monitor
from nanotrain_core.testing import run_ranks

MOE = [
    "model={use='deepseek', layers=2, dense_layers=1, width=32, vocab=64, heads=2, q_rank=16, kv_rank=8, "
    "nope_size=8, rope_size=8, value_size=8, ffn=64, experts=8, top_k=2, shared_experts=1, expert_ffn=16, "
    "bias_update_rate=0.005}"
]
LONG = [*MOE, "run.steps=60", "optimizer.lr=3e-3", "batch.sequences=32", "batch.microbatch=16"]
EP = [*MOE, 'parallel=[{use="ep_deepseek"}]', "topology.ep=2"]


class Load(Monitor):
    """Records the tokens of the busiest expert divided by the mean, for every step."""

    def __init__(self):
        self.worst = []

    def on_step(self, report):
        self.worst.append(report.expert_load)


def load(overrides):
    """Return the average of this ratio over the last ten steps."""
    engine, _ = engine_of(overrides)
    seen = Load()
    engine.events.monitors = (seen,)
    engine.fit()
    return sum(seen.worst[-10:]) / 10


def main():
    print(f"busiest expert over the mean, without a bias: {load([*LONG, 'model.bias_update_rate=0.0']):.1f}")
    print(f"                                  with a bias: {load(LONG):.1f}")
    ranks, alone = run_ranks(train, 2, EP), train(MOE)
    print("weights after 5 steps over ep 2:", same(largest_difference(ranks, alone)))


if __name__ == "__main__":
    main()
