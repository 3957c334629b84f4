"""Lesson 5: a pipeline and its bubble. Look at: idle time falls with more microbatches and a better order.

    python docs/examples/learn/05_pipeline.py

Each rank has some layers; a microbatch passes through all ranks and its gradients come back. Until the
first microbatch has arrived the last rank waits: the bubble. A schedule is *data*, a list of actions F
(forward), B (backward) and W (weight gradients) for each rank, so that its idle time is known before
anything runs. 1F1B: (p - 1) / (m + p - 1) of the time, with p ranks and m microbatches. Source: arXiv
2104.04473, section 2.2.
"""

from common import largest_difference, same, train

from nanotrain_core.api import load_plugins, simulate
from nanotrain_core.testing import run_ranks

PP = ['schedule={use="1f1b"}', "topology.pp=2"]
NAMES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1")


def bubble(name, ranks, microbatches):
    """Return the idle share of a schedule of equal stages; backward takes twice as long as forward."""
    registry = load_plugins()
    component = registry.get("schedule", name)
    schedule = component.build(component.config())
    return simulate(schedule.actions(ranks, microbatches)).bubble()


def main():
    print("idle share, p = 4:     " + "".join(f"m = {m:<6}" for m in (4, 8, 32)))
    for name in NAMES:
        print(f"{name:23}" + "".join(f"{bubble(name, 4, m):<10.1%}" for m in (4, 8, 32)))
    print(f"{'(p - 1) / (m + p - 1)':23}" + "".join(f"{3 / (m + 3):<10.1%}" for m in (4, 8, 32)))
    print("weights after 5 steps:", same(largest_difference(run_ranks(train, 2, PP), train([]))))


if __name__ == "__main__":
    main()
