"""A small dense recipe, and other layouts of a recipe."""

from nanotrain_plan.advice import (
    with_component,
    with_degree,
    with_microbatch,
    with_recompute,
    with_zero,
)

DENSE = """
[run]
steps = 10
ranks = 16
[batch]
sequences = 64
microbatch = 1
length = 512
[model]
use = "transformer"
layers = 8
width = 256
heads = 8
vocab = 1024
[topology]
use = "grid"
pp = 2
tp = 2
[[parallel]]
use = "tp"
[schedule]
use = "1f1b"
[optimizer]
use = "zero12"
bucket_mb = 0.25
[precision]
use = "bf16"
[data]
use = "synthetic"
vocab = 256
"""


#: Of a small model a message between stages, held a little longer or not, and the buckets that gradient
#: sync keeps between steps are a part of what there is.
SMALL = 0.05


def changed(
    found, pp=None, tp=None, ep=None, cp=None, microbatch=None, recompute="", stage=None, schedule=None
):
    recipe, registry = found.recipe, found.registry
    for dim, degree in (("pp", pp), ("tp", tp), ("ep", ep), ("cp", cp)):
        recipe = with_degree(recipe, registry, dim, degree) if degree else recipe
    recipe = with_microbatch(recipe, microbatch) if microbatch else recipe
    recipe = with_recompute(recipe, registry, recompute) if recompute != "" else recipe
    recipe = with_zero(recipe, registry, stage) if stage else recipe
    return with_component(recipe, registry, "schedule", schedule) if schedule else recipe
