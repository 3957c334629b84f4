"""Losses and gradients compared with those of float32."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nanotrain_core.component import Support
from nanotrain_core.contracts import StepReport
from nanotrain_core.testing.altered import FirstStep, first_step
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check, distributed
from nanotrain_core.testing.checks.parallel import one_process
from nanotrain_core.testing.checks.precision import ADAMW, precision_of, relative_error
from nanotrain_core.testing.compare import Whole, whole
from nanotrain_core.testing.pool import run_ranks

#: Between which the share of float32's gradient in a gradient must lie: of one that is lost it is 0, of one
#: that is counted twice 2. Of a router in FP8, where up to a sixth of the tokens have other experts, 0.5.
SHARES = (0.1, 1.9)
#: How far losses of the tiny model may be from float32's, relative: one of them, and the mean of 20 steps.
#: Eight bits in the GEMMs move single ones by up to 7%, as often up as down, and the mean by 0.3%.
ONE_LOSS, MEAN_LOSS = 0.1, 0.01

#: Of what float32's loss falls in 20 steps, how much that of a precision must which is further away.
LEARNT = 0.75


def losses(case: Case) -> tuple[Sequence[StepReport], Sequence[StepReport]]:
    """Return the reports of 20 steps of the tiny model, and of the same ones in float32."""
    changes = {"run": {"steps": 20}, "optimizer": ADAMW, "batch": {"microbatch": 4}}
    narrow = one_process(case, **changes).reports
    wide = one_process(case, **changes, precision={"use": "fp32"}).reports
    assert wide[-1].loss < wide[0].loss, "the float32 run does not learn: nothing was tested"
    return narrow, wide


@check("precision", since="0.1", promise="follows_float32")
def loss_follows_float32(case: Case) -> None:
    """Over 20 steps of the tiny model, losses are float32's: each within 10%, and their mean within 1%."""
    narrow, wide = losses(case)
    away = [got.loss / want.loss - 1 for got, want in zip(narrow, wide, strict=True)]
    worst = max(range(len(away)), key=lambda step: abs(away[step]))
    mean = sum(away) / len(away)
    got, want = narrow[worst], wide[worst]
    found = (
        f"{len(away)} losses are {mean:+.1%} from float32's in the mean, of {MEAN_LOSS:.0%} allowed, and "
        f"{away[worst]:+.1%} at step {got.step}, of {ONE_LOSS:.0%}: {got.loss:.4f} for {want.loss:.4f}"
    )
    assert max(abs(away[worst]) / ONE_LOSS, abs(mean) / MEAN_LOSS) < 1, (
        f"{found}. Where a float32 master does no better, it is the format: say so with "
        'Component(supports={"follows_float32": Support.PARTIAL})'
    )


def _follows_in_part(case: Case) -> bool:
    return case.supported("follows_float32") is not Support.FULL


@check("precision", since="0.2", applies=_follows_in_part, promise="keeps_small_updates")
def loss_falls_beside_float32s(case: Case) -> None:
    """Where losses need not be float32's: in 20 steps the loss falls at least three quarters as far."""
    narrow, wide = losses(case)
    fell, wanted = (reports[0].loss - reports[-1].loss for reports in (narrow, wide))
    assert fell > LEARNT * wanted, (
        f"in {len(wide)} steps the loss falls from {narrow[0].loss:.4f} to {narrow[-1].loss:.4f}, float32's "
        f"from {wide[0].loss:.4f} to {wide[-1].loss:.4f}: expected at least {LEARNT:.0%} of that"
    )


#: On ranks a gradient may be this many times as far from float32's as in one process, and further by this
#: share of it: partial sums are rounded, and tiles begin elsewhere. Of one that is half lost 0.5 is missing.
FURTHER, BESIDES = 2.0, 0.15
#: Gradients of a smaller share of the largest are not compared: little is left of them in a narrow format.
SMALL = 1e-3


@check("precision", since="0.2")
def every_weight_has_its_gradient(case: Case) -> None:
    """In the first step each parameter's gradient has float32's, of the same weights, in it, and once.

    On several ranks it is about as near float32's as in one process.
    """
    changes = {"run": {"steps": 1}, **({} if distributed(case) else {"batch": {"microbatch": 4}})}
    ranks: list[FirstStep] = run_ranks(first_step, case.world_size, case, changes)
    wide = {**changes, "precision": {"use": "fp32"}}
    # With others, as before they were rounded, a router chooses other experts, and gradients differ. With
    # these it does for some tokens: they move a gradient far, but hardly along float32's.
    same = whole([rank.weights for rank in ranks])
    (plain,) = run_ranks(first_step, 1, case.alone(), wide, same)
    scale = precision_of(case).loss_scale.value
    got, want = whole([rank.gradients for rank in ranks], atol=math.inf), whole([plain.gradients])
    largest = max(gradient.norm() for gradient in want.values())
    compared = {name: want[name].double() for name in want if want[name].norm() > SMALL * largest}
    for name, exact in compared.items():
        found = got[name].double() / scale
        share = float((found * exact).sum() / exact.square().sum())
        assert SHARES[0] < share < SHARES[1], (
            f"{name}: the gradient has {share:.3g} times float32's in it, where 1 is right and 0 none at "
            f"all; it is {relative_error(found, exact):.3g} of it away"
        )
    if distributed(case):
        (alone,) = run_ranks(first_step, 1, case.alone(), changes)
        _assert_as_near(got, whole([alone.gradients]), compared, scale)


def _assert_as_near(got: Whole, alone: Whole, exact: Whole, scale: float) -> None:
    for name, wanted in exact.items():
        here, there = (relative_error(found[name].double() / scale, wanted) for found in (got, alone))
        assert here <= FURTHER * there + BESIDES, (
            f"{name}: the gradient on several ranks is {here:.3g} of float32's away from it, in one process "
            f"{there:.3g}: what `convert` puts in the place of a module must keep its hooks and its tag "
            "(nanotrain_core.api.replace_module)"
        )
