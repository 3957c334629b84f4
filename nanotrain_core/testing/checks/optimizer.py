"""An optimizer uses the whole model's gradient on any layout, and its state can be restored."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from nanotrain_core.errors import NanotrainError
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check, distributed
from nanotrain_core.testing.compare import EXACT, assert_bitwise, assert_numbers, assert_same, whole
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import Drive, drive, make_run, push, train
from nanotrain_core.testing.probe import weights as weights_of

#: Sizes of the gradients of three steps: growing, so that clipping differs from a constant factor.
SCALES = [1.0, 30.0, 3.0]


def driven(
    case: Case, scales: list[float] | None = None, *, clip: float = 0.0, **options: Any
) -> list[Drive]:
    """Step the optimizer on the case's ranks with gradients of the given sizes."""
    changes = {"optimizer": {"clip_norm": clip}}
    found: list[Drive] = run_ranks(drive, case.world_size, case, changes, scales or SCALES, **options)
    return found


def weights(ranks: list[Drive]) -> dict[str, torch.Tensor]:
    """Return the whole model's weights after the last step."""
    return whole([r.weights for r in ranks])


def undecayed(case: Case) -> Case:
    """Return the case without weight decay, if its optimizer has it."""
    decay = {"weight_decay": 0.0} if has_decay(case) else {}
    return attrs.evolve(case, config={**case.config, **decay})


@check("optimizer", since="0.1")
def gradient_norm_is_global(case: Case) -> None:
    """Every rank reports the 2-norm of the whole model's gradient, before clipping."""
    (plain,) = driven(attrs.evolve(case.alone(), config={}), [1.0], lr=0.0)
    size = sum(block.tensor.numel() for block in plain.weights)
    expected = plain.norms
    assert 0.9 < expected[0] / math.sqrt(size) < 1.1, f"norm {expected[0]} of {size} standard normals"
    for drive_of_rank in driven(case, [1.0, 30.0], clip=0.5):
        got = drive_of_rank.norms
        assert abs(got[0] / expected[0] - 1) < EXACT, f"gradient norm {got[0]}, one process: {expected[0]}"
        assert 15 < got[1] / got[0] < 60, f"gradients 30 times as large have norms {got}"


@check("optimizer", since="0.1", applies=distributed)
def layout_changes_nothing(case: Case) -> None:
    """Given the same gradients, the weights equal those of one process to 1e-10."""
    got, want = weights(driven(case)), weights(driven(case.alone()))
    try:
        assert_same(got, want, "weights after 3 steps")
    except AssertionError as error:
        hint = (
            "if the update of an element needs others of its parameter, as their norm: a rank may hold a "
            "block (placement.sharded) or a flat range of it (piece.span); WholeTensors gathers whole ones"
        )
        raise AssertionError(f"{error}; {hint}") from None


@check("optimizer", since="0.1")
def clips_to_the_global_norm(case: Case) -> None:
    """Clipping at c is the same as dividing the gradients by norm / c where the norm is above c."""
    norms = driven(case)[0].norms
    clip = 0.5 * min(norms)
    scaled = [scale * clip / norm for scale, norm in zip(SCALES, norms, strict=True)]
    clipped, by_hand = weights(driven(case, clip=clip)), weights(driven(case, scaled))
    assert_same(clipped, by_hand, f"weights, clipped at {clip:.4g}", atol=1e-6)


@check("optimizer", since="0.1")
def small_gradients_are_not_clipped(case: Case) -> None:
    """A gradient whose norm is below the limit is not clipped."""
    limit = 10 * max(driven(case)[0].norms)
    assert_same(weights(driven(case, clip=limit)), weights(driven(case)), "weights, limit not reached")


@check("optimizer", since="0.1")
def loss_scale_divides_out(case: Case) -> None:
    """Gradients multiplied by the loss scale, passed to the optimizer, give the same weights and norms."""
    plain, scaled = (driven(case, clip=0.5, loss_scale=scale) for scale in (1.0, 1024.0))
    assert_same(weights(scaled), weights(plain), "weights with a loss scale of 1024")
    assert_numbers(scaled[0].norms, plain[0].norms, "gradient norms", atol=1e-7)


@check("optimizer", since="0.1")
def learning_rate_is_honored(case: Case) -> None:
    """A rate of 0 in ``inner.param_groups`` moves no weight; the configured rate moves every one."""
    stopped, moved = driven(case, lr=0.0), driven(case)
    assert_same(weights(stopped), whole([r.before for r in stopped]), "weights at a rate of 0", atol=0.0)
    before = whole([r.before for r in moved])
    still = [name for name, w in weights(moved).items() if torch.equal(w, before[name])]
    assert not still, f"not moved by 3 steps: {still}"


@check("optimizer", since="0.1")
def no_gradient_no_change(case: Case) -> None:
    """A gradient of zero, without weight decay, changes no weight on the first step."""
    ranks = driven(undecayed(case), [0.0])
    assert_same(weights(ranks), whole([r.before for r in ranks]), "weights after a zero gradient", atol=0.0)


@check("optimizer", since="0.1")
def first_step_descends(case: Case) -> None:
    """Without weight decay the first step moves every tensor along its negative gradient, not against it."""
    case = undecayed(case)
    plain = attrs.evolve(case.alone(), use="sgd", config={})  # minus the gradient, times the learning rate
    moved, downhill = (
        {name: after - before[name] for name, after in weights(ranks).items()}
        for ranks in (driven(case, [1.0]), driven(plain, [1.0]))
        for before in [whole([rank.before for rank in ranks])]
    )
    uphill = [name for name, step in moved.items() if (step * downhill[name]).sum() <= 0]
    assert not uphill, f"moved along the gradient, uphill: {uphill}"


def has_decay(case: Case) -> bool:
    """Return whether the config has a ``weight_decay``."""
    return "weight_decay" in [field.name for field in attrs.fields(case.component().config)]


@check("optimizer", since="0.1", applies=has_decay)
def weight_decay_is_for_matrices(case: Case) -> None:
    """At a gradient of zero, weight decay shrinks every tensor of two dimensions or more and no other."""
    decayed = attrs.evolve(case, config={**case.config, "weight_decay": 0.5})
    ranks = driven(decayed, [0.0])
    before, after = whole([rank.before for rank in ranks]), weights(ranks)
    for name, weight in after.items():
        if weight.dim() > 1:
            assert weight.norm() < before[name].norm(), f"{name} did not shrink"
        else:
            assert torch.equal(weight, before[name]), f"{name}, which has one dimension, moved"


@check("optimizer", since="0.1")
def overflow_is_skipped(case: Case) -> None:
    """Asked to, all ranks skip a step whose gradient is infinite on one: weights and state stay."""
    ranks = driven(case, [1.0], overflow_from=case.world_size - 1)
    assert all(r.skipped == [True] for r in ranks), f"skipped, by rank: {[r.skipped for r in ranks]}"
    assert_same(weights(ranks), whole([r.before for r in ranks]), "weights after a skipped step", atol=0.0)
    finite = all(torch.isfinite(b.tensor).all() for r in ranks for b in r.state)
    assert finite, "the state holds the overflow that was skipped"


@check("optimizer", since="0.1")
def state_has_a_place(case: Case) -> None:
    """State blocks have unique names on a rank, tile their global shapes, and agree between replicas."""
    ranks = driven(case)
    for rank, found in enumerate(ranks):
        keys = [(block.name, block.offset) for block in found.state]
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        assert not repeated, f"rank {rank}: several blocks named {repeated}"
    names = set(weights(ranks))
    for name in whole([r.state for r in ranks]):
        _, _, parameter = name.partition("/")
        assert parameter in names, f"state block {name} is not named PREFIX/PARAMETER"


@check("optimizer", since="0.1")
def resume_is_bit_equal(case: Case) -> None:
    """Stopped after 3 of 6 steps and resumed, weights, state and its own numbers end bitwise equal."""
    with tempfile.TemporaryDirectory() as name:
        options: dict[str, Any] = {"folder": Path(name), "save_at": 3}
        changes = {"run": {"steps": 6}}
        through = run_ranks(train, case.world_size, case, changes, **options)
        resumed = run_ranks(train, case.world_size, case, changes, **options, resume="3")
    for rank, (one, other) in enumerate(zip(through, resumed, strict=True)):
        assert_bitwise(whole_of(other), whole_of(one), f"rank {rank}, resumed after step 3")
        assert other.meta == one.meta, f"rank {rank}: {other.meta} instead of {one.meta}"
        assert_same_numbers(other.numbers, one.numbers)


def assert_same_numbers(resumed: Mapping[str, float], through: Mapping[str, float]) -> None:
    """Assert that a resumed optimizer's own numbers are those of a run that was not stopped.

    What depends on a lost count of steps may do so long after the few steps of a check.
    """
    for name, number in through.items():
        assert resumed.get(name) == number, (
            f"the optimizer's {name} is {resumed.get(name)} in the resumed run, {number} in one that was not "
            "stopped: return it from meta() and restore it in load_meta()"
        )


@check("optimizer", since="0.1")
def lost_weights_are_carried_or_refused(case: Case) -> None:
    """Masters whose error must be carried are refused, or updates too small for them arrive with time."""
    case = undecayed(case)
    (exact,) = run_ranks(drift, 1, case.alone(), {"use": "fp64"})
    assert exact is not None
    coarse = {"use": "coarse", "step": 3 * exact / MANY}
    for number, moved in enumerate(run_ranks(drift, case.world_size, case, coarse)):
        if moved is not None:
            assert 0.4 < moved / exact < 2, (
                f"rank {number}: {MANY} updates moved weights by {moved:.3g} where masters round to 1/17 of "
                f"{exact:.3g}, which is how far exact masters move: their error is dropped"
            )


#: Updates of equal sign. A coarse master rounds to three of them, so that none is seen by itself.
MANY = 50


def drift(case: Case, precision: dict[str, Any]) -> float | None:
    """Return the mean change of all weights under equal gradients; None if the masters are rejected."""
    try:
        run = make_run(case, {"precision": precision, "optimizer": {"clip_norm": 0.0}})
    except NanotrainError:
        return None
    before = weights_of(run)
    for _ in range(MANY):
        push(run, 0, 1.0)
        run.optimizer.step()
        run.gradients.zero()
    ways = [(new.tensor - old.tensor).abs() for old, new in zip(before, weights_of(run), strict=True)]
    return sum(way.sum().item() for way in ways) / sum(way.numel() for way in ways)


def whole_of(trace: Any) -> dict[str, torch.Tensor]:
    """Return a rank's own weight and state blocks by name and offset."""
    return {f"{b.name}@{b.offset}": b.tensor for b in [*trace.weights, *trace.state]}
