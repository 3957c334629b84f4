"""An optimizer uses the rate of each step, ignores skipped ones, and stays correct over many and in parts."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import attrs

from nanotrain_core.contracts import Block
from nanotrain_core.errors import NanotrainError
from nanotrain_core.optim import master_optimizer
from nanotrain_core.optim.master_shards import waves
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check, distributed
from nanotrain_core.testing.checks.optimizer import (
    assert_same_numbers,
    driven,
    has_decay,
    undecayed,
    weights,
    whole_of,
)
from nanotrain_core.testing.compare import assert_bitwise, assert_same, whole
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import Drive, make_run, push, train
from nanotrain_core.testing.probe import weights as weights_of


@check("optimizer", since="0.2")
def learning_rate_of_each_step(case: Case) -> None:
    """At a rate of 0 a later step moves no weight, at half of it half as far, and the next all of them."""
    ones = [1.0] * 4
    decay = {"weight_decay": 0.1} if has_decay(case) else {}  # what decays may be a group of its own
    decayed, case = attrs.evolve(case, config={**case.config, **decay}), undecayed(case)
    ranks = driven(decayed, ones, rates=[1.0, 0.0, 1.0, 0.0])
    after = [whole([rank.each[step] for rank in ranks]) for step in range(4)]
    for step in (1, 3):
        assert_same(after[step], after[step - 1], f"weights of step {step + 1}, at a rate of 0", atol=0.0)
    still = [name for name, weight in after[2].items() if weight.equal(after[1][name])]
    assert not still, f"not moved by step 3, at the configured rate after a step at 0: {still}"
    full, half = driven(case, ones[:2]), driven(case, ones[:2], rates=[1.0, 0.5])
    start = whole([rank.each[0] for rank in full])
    far, near = ((whole([r.each[1] for r in ranks]), ranks) for ranks in (full, half))
    for name, begin in start.items():
        ways = [(found[name].double() - begin.double()).norm().item() for found, _ in (far, near)]
        assert 0.3 * ways[0] < ways[1] < 0.7 * ways[0], (
            f"{name}: at half the rate step 2 moves it by {ways[1]:.4g}, at the full rate by {ways[0]:.4g}"
        )


@check("optimizer", since="0.2", variants=("first", "second"))
def a_skipped_step_leaves_no_trace(case: Case, skipped: str) -> None:
    """A skipped step leaves weights, state and meta as if it had not occurred."""
    before = [1.0] if skipped == "second" else []
    scales, last = [*before, 1.0, 3.0, 2.0], case.world_size - 1
    numbers = list(range(len(scales)))
    bad = len(before)
    disturbed = driven(
        case,
        [*scales[:bad], 1.0, *scales[bad:]],
        numbers=[*numbers[:bad], 99, *numbers[bad:]],
        overflow_from=last,
        overflow_in=bad,
    )
    plain = driven(case, scales, numbers=numbers)
    for rank, (one, other) in enumerate(zip(disturbed, plain, strict=True)):
        assert one.skipped[bad], f"rank {rank} did not skip step {bad + 1}, whose gradient is infinite"
        what = f"rank {rank}, after step {bad + 1} of {len(scales) + 1} was skipped"
        assert_bitwise(_held(one), _held(other), what)
        assert one.meta == other.meta, f"{what}: meta {one.meta}, without that step {other.meta}"


def _held(drive: Drive) -> dict[str, Any]:
    return {f"{b.name}@{b.offset}": b.tensor for b in [*drive.weights, *drive.state]}


@check("optimizer", since="0.2", applies=distributed)
def twenty_steps_on_any_layout(case: Case) -> None:
    """Given the same 20 gradients, large and small, the weights equal those of one process to 1e-8."""
    scales = [10.0 ** (step % 4 - 1) for step in range(20)]
    got, want = (weights(driven(each, scales, clip=1.0)) for each in (case, case.alone()))
    assert_same(got, want, "weights after 20 steps", atol=1e-8)


@check("checkpoint", since="0.2")
@check("optimizer", since="0.2")
def resumed_twice_is_the_same_run(case: Case) -> None:
    """Stopped after 2 and after 4 of 6 steps, and resumed both times, all ends bitwise equal."""
    changes: dict[str, Any] = {"run": {"steps": 6}}
    if case.kind == "checkpoint":
        changes["optimizer"] = {"use": "adamw", "lr": 0.01, "clip_norm": 1.0}
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        through = run_ranks(train, case.world_size, case, changes, folder=Path(one), save_at=2)
        folder = Path(other)
        early = {**changes, "run": {"steps": 2}}
        run_ranks(train, case.world_size, case, early, folder=folder, save_at=2)
        middle = {**changes, "run": {"steps": 4}}
        run_ranks(train, case.world_size, case, middle, folder=folder, save_at=4, resume="auto")
        twice = run_ranks(train, case.world_size, case, changes, folder=folder, resume="auto")
    for rank, (whole_run, resumed) in enumerate(zip(through, twice, strict=True)):
        what = f"rank {rank}, resumed after steps 2 and 4"
        assert_bitwise(whole_of(resumed), whole_of(whole_run), what)
        assert resumed.meta == whole_run.meta, f"{what}: {resumed.meta} instead of {whole_run.meta}"
        if case.kind == "optimizer":
            assert_same_numbers(resumed.numbers, whole_run.numbers)


@check("optimizer", since="0.3")
def masters_are_updated_in_parts(case: Case) -> None:
    """Masters that are loaded and stored one after the other end as those updated at once, or are refused."""
    at_once, in_parts = (
        run_ranks(stepped, case.world_size, case, precision)
        for precision in ({"use": "fp64"}, {"use": "coarse", "step": 0.0})
    )
    if None in in_parts:
        return
    try:
        assert_same(
            whole(in_parts), whole(at_once), "weights after 3 steps, each weight in a call of its own"
        )
    except AssertionError as error:
        hint = (
            "a step may call inner.step several times, each for some weights: it may change the state of "
            "these alone; precondition() is called once in a step: a count of steps advances there, and a "
            "weight is read with shard.master.load()"
        )
        raise AssertionError(f"{error}; {hint}") from None


def stepped(case: Case, precision: dict[str, Any]) -> list[Block] | None:
    """Return a rank's weights after three steps, in waves of one master; None if the masters are rejected."""
    try:
        run = make_run(case, {"precision": precision, "optimizer": {"clip_norm": 0.0}})
    except NanotrainError:
        return None
    with mock.patch.object(master_optimizer, "waves", partial(waves, limit=1)):
        for step in range(3):
            push(run, step, 1.0)
            run.optimizer.step()
            run.gradients.zero()
    return weights_of(run)
