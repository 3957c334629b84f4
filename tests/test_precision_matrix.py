"""Precisions in the matrix of compositions: each meets every layout, schedule, model and wrapper there is.

What a precision rounds depends on the layout (tiles that a split cuts, sums in another order), so runs are
compared with one process of the same precision within bounds that are far below what a rank that adds too
little, or too much, would be off by. Those that hold in float64 to 1e-9 stand in ``test_composition.py`` and
``test_precision_composition.py``.
"""

from functools import cache
from random import Random

import attrs
import pytest
from compositions import Composition, choices, everything
from covering import cover

from nanotrain_core.testing.case import Case
from nanotrain_core.testing.compare import whole
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import Trace, train

#: Widths of which every part that a rank may have is a multiple of 16.
WIDE = {"width": 64, "ffn": 128, "init_std": 0.1}
WIDE_GPT = {"heads": 4, "kv_heads": 2}
WIDE_MOE = {**WIDE_GPT, "expert_ffn": 64}
WIDE_DEEPSEEK = {"kv_rank": 16, "nope_size": 16, "rope_size": 16, "value_size": 16, "expert_ffn": 64}
#: Cut alike on every layout, into microbatches of 1 or 2: what one holds is rounded together.
EVEN = {"sequences": 8, "length": 8}


@attrs.define(frozen=True)
class Bounds:
    """How far a composition may be from one process, relative: 1.3 to 2 times what was measured."""

    gradients: float
    """All first gradients taken as one vector."""
    norm: float
    """That of the first step."""
    loss: float
    """Every step's."""


#: bfloat16's sums in another order, and what they tip over in routers.
SUMS = Bounds(gradients=0.25, norm=0.05, loss=0.03)
#: Tiles that tp cuts, and those of the rows that experts are sent: see ``test_precision_composition.py``.
TILES = Bounds(gradients=0.6, norm=0.1, loss=0.16)
#: In four bits, with other noise for a block of which a number differs: wider than measured on a few.
FOUR_BITS = Bounds(gradients=0.9, norm=0.3, loss=0.2)
#: A sum in another order moves a weight to the next of 16 codes: 1.4% to 4.8% after two steps with four seeds
#: where tp sums bfloat16, and 1e-8 on the same layout without tp.
CODES = Bounds(gradients=0.25, norm=0.05, loss=0.09)
PRECISIONS = {
    "fp8": ({"use": "fp8_deepseek_v3"}, TILES),
    "hybrid": ({"use": "fp8_hybrid"}, TILES),
    "mxfp8": ({"use": "mxfp8"}, TILES),
    "nvfp4": ({"use": "nvfp4"}, FOUR_BITS),
    "residual": ({"use": "fp4_master", "config": {"format": "nvfp4", "variant": "residual"}}, SUMS),
    "eco": ({"use": "fp4_master", "config": {"format": "nf4", "variant": "eco", "block_size": 16}}, CODES),
    "remainder": ({"use": "fp4_master", "config": {"format": "bf16", "variant": "remainder"}}, SUMS),
    "bf16": ({"use": "bf16"}, SUMS),
    "fp16": ({"use": "fp16"}, SUMS),
}
#: Those of the first tier, and the ranks that each may have there. For 4-bit masters there is
#: ``test_precision_composition.py``.
QUICK = {"fp8": 2}


def case_of(precision: str, composition: Composition) -> Case:
    """Return a composition as a case of its precision."""
    grid = composition.case()
    model = {**grid.overrides["model"], **WIDE}
    if composition.model == "transformer":
        model |= WIDE_GPT
    elif composition.model == "moe":
        model |= WIDE_MOE
    else:
        model |= WIDE_DEEPSEEK | ({"q_rank": 16} if "q_rank" in model else {})
    optimizer = composition.optimizers()["adamw"]
    if composition.zero:
        optimizer = {**optimizer, "bucket_mb": 0.05}  # ends within tensors of this width
    batch = {**EVEN, "microbatch": composition.microbatch - 1}
    overrides = {**grid.overrides, "batch": batch, "model": model, "optimizer": optimizer}
    table, _ = PRECISIONS[precision]
    return Case(
        "precision",
        topology=grid.topology,
        overrides=overrides,
        name=composition.id,
        plugins=grid.plugins,
        **table,
    )


def covering(precision: str, most: int) -> list[Composition]:
    """Return few compositions of up to ``most`` ranks that make every choice of every axis.

    Others for each precision.
    """
    found = everything()
    order = [row for row, each in enumerate(found) if each.ranks <= most]
    Random(precision).shuffle(order)
    return [found[order[row]] for row in cover(choices()[order])]


@cache
def alone(precision: str, like: Composition) -> Trace:
    """Train in one process."""
    (trace,) = run_ranks(train, 1, case_of(precision, like).alone(), {})
    return trace


def in_one_process(precision: str, composition: Composition) -> Trace:
    """Return what it must be near to: the same model, and microbatches as large."""
    fields = ("model", "layers", "tied", "microbatch")
    same = (c for c in everything() if all(getattr(c, f) == getattr(composition, f) for f in fields))
    return alone(precision, next(same))


CASES = [
    pytest.param(name, found, id=f"{name}-{found.id}", marks=[pytest.mark.full] * (number > 0))
    for name, most in QUICK.items()
    for number, found in enumerate(covering(name, most))
]
CASES += [
    pytest.param(name, found, id=f"{name}-{found.id}", marks=pytest.mark.full)
    for name in PRECISIONS
    for found in covering(name, 8)
]


@pytest.mark.parametrize(("precision", "composition"), CASES)
def test_it_trains_nearly_as_in_one_process(precision, composition):
    one, (_, bounds) = in_one_process(precision, composition), PRECISIONS[precision]
    ranks = run_ranks(train, composition.ranks, case_of(precision, composition), {})
    found, wanted = whole([t.gradients for t in ranks], atol=1e-3), whole([one.gradients])
    assert found.keys() == wanted.keys()
    error = sum(((found[n] - wanted[n]).double() ** 2).sum() for n in wanted).sqrt()
    error /= sum((wanted[n].double() ** 2).sum() for n in wanted).sqrt()
    norms = [abs(trace.reports[0].grad_norm / one.reports[0].grad_norm - 1) for trace in ranks]
    losses = [
        abs(a.loss / b.loss - 1) for trace in ranks for a, b in zip(trace.reports, one.reports, strict=True)
    ]
    assert error < bounds.gradients
    assert max(norms) < bounds.norm
    assert max(losses) < bounds.loss
