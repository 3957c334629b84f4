"""One rank of a checkout that trains whenever it is asked to: ``python FILE '{"file": ..., ...}'``.

It is started by :mod:`benchmarks.earlier` with the Python and in the folder of one of two checkouts, so it
uses nothing but what both have. Each line on standard input is a number of optimizer steps; the answer is a
line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    """Build the engine, then train as many steps as each line says, until there are no more lines."""
    told = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the engine prints is no answer
    sys.path.insert(0, os.getcwd())

    import torch
    import torch.distributed as dist

    from nanotrain_core.engine import RuntimeEngine
    from nanotrain_core.recipe import load_recipe

    rank, ranks = told["rank"], told["ranks"]
    torch.set_num_threads(told["threads"])
    if ranks > 1:
        dist.init_process_group(
            "gloo", store=dist.FileStore(told["store"], ranks), rank=rank, world_size=ranks
        )
    recipe = load_recipe(told["file"], overrides=told["overrides"], ranks=ranks)
    engine = RuntimeEngine.from_recipe(recipe, rank=rank)
    for line in sys.stdin:
        clock, processor = time.perf_counter(), time.process_time()
        engine.fit(steps=engine.step + int(line))
        seconds = {"clock": time.perf_counter() - clock, "processor": time.process_time() - processor}
        answers.write(json.dumps(seconds) + "\n")


if __name__ == "__main__":
    main()
