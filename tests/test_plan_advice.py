"""Recipes that are out of memory, each of another kind: advice that is followed makes them fit."""

import attrs
import pytest
from nanotrain_plan.advice import advise, changes, try_plan
from nanotrain_plan.hardware import find_hardware

from nanotrain_core.api import resolve_recipe

RECIPE = """
[run]
steps = 10
ranks = {ranks}
[batch]
sequences = {sequences}
microbatch = {microbatch}
length = {length}
[model]
{model}
[precision]
use = "{precision}"
{more}
[data]
use = "synthetic"
vocab = 128
"""
TRANSFORMER = 'use = "transformer"\nlayers = {}\nwidth = {}\nheads = 4\nvocab = {}'
MOE = (
    'use = "deepseek"\nlayers = 3\ndense_layers = 1\nwidth = 64\nheads = 4\nvocab = 256\nq_rank = 32\n'
    "kv_rank = 16\nnope_size = 16\nrope_size = 8\nvalue_size = 16\nffn = 128\nexperts = 8\ntop_k = 4\n"
    "shared_experts = 1\nexpert_ffn = 512\ngroups = 1\ngroup_limit = 1"
)

#: What fills the memory, a recipe, and the share of the peak that what it names must have.
#: Those of the first tier.
QUICK = ("logits",)
KINDS = {
    "weights": (TRANSFORMER.format(4, 512, 256), 4, 4, 1, 16, "bf16"),
    "activations": (TRANSFORMER.format(8, 64, 256), 1, 16, 8, 512, "bf16"),
    "logits": (TRANSFORMER.format(1, 32, 32768), 1, 8, 8, 128, "bf16"),
    "expert buffers": (MOE, 1, 8, 8, 128, "bf16"),
}


def follow(told, recipe, registry):
    """Make the changes that an advice names, one after the other, as a user would."""
    for each in told.split(" and "):
        (change,) = [change for change in changes(recipe, registry) if change.told == each]
        recipe = change.apply(recipe)
    return recipe


def fills(plan):
    """Return what takes most at the peak: by holder, and activations by module."""
    held = {name: size for name, size in plan.worst.held.items() if size}
    state = (
        held.get("weights", 0) + held.get("masters", 0) + held.get("optimizer", 0) + held.get("gradients", 0)
    )
    return state / plan.worst.peak


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.full] * (kind not in QUICK)) for kind in KINDS]
)
def test_advice_that_is_followed_fits(kind, tmp_path):
    model, ranks, sequences, microbatch, length, precision = KINDS[kind]
    path = tmp_path / "full.toml"
    path.write_text(
        RECIPE.format(
            ranks=ranks, sequences=sequences, microbatch=microbatch, length=length, model=model,
            precision=precision, more="" if ranks == 1 else "[[parallel]]\nuse = \"ddp\"",
        )
    )  # fmt: skip
    found, hardware = resolve_recipe(str(path)), find_hardware("h100")
    roomy = try_plan(found.recipe, found.registry, hardware)
    assert (fills(roomy) > 0.5) == (kind == "weights")
    small = attrs.evolve(hardware, memory_gb=0.85 * roomy.worst.peak / 1e9, reserved_gb=0.0)
    plan = try_plan(found.recipe, found.registry, small)
    assert not plan.fits
    advice = advise(plan, found.registry)
    best = next(each for each in advice if each.peak <= small.usable)
    followed = try_plan(follow(best.told, found.recipe, found.registry), found.registry, small)
    assert followed.fits
    assert followed.worst.peak == best.peak


@pytest.mark.parametrize(
    ("told", "sets"),
    [
        (
            'topology.tp = 2, first [[parallel]] use = "tp"',
            ["topology.tp=2", 'parallel=[{use="tp"},{use="ddp"}]'],
        ),
        ('topology.pp = 2, schedule.use = "1f1b"', ["topology.pp=2", 'schedule={use="1f1b"}']),
    ],
)
def test_a_degree_comes_with_the_component_that_handles_it(told, sets, tmp_path):
    model, _, sequences, microbatch, length, precision = KINDS["weights"]
    path = tmp_path / "two.toml"
    path.write_text(
        RECIPE.format(
            ranks=2, sequences=sequences, microbatch=microbatch, length=length, model=model,
            precision=precision, more="[[parallel]]\nuse = \"ddp\"",
        )
    )  # fmt: skip
    found = resolve_recipe(str(path))
    written = resolve_recipe(str(path), overrides=sets).recipe
    (change,) = [change for change in changes(found.recipe, found.registry) if change.told == told]
    followed = change.apply(found.recipe)
    for kind in ("topology", "parallel", "schedule"):
        assert getattr(followed, kind) == getattr(written, kind), kind
