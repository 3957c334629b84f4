"""The guard judges losses by what was good before, and a run goes back to before they went wrong."""

import json
import math

import attrs
import pytest
import torch
from test_run import metrics

from nanotrain_core.builtin.configs import GuardConfig
from nanotrain_core.contracts import Monitor, RollbackReport, StepReport
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.errors import Diverged
from nanotrain_core.monitors.guard import Guard
from nanotrain_core.run.restore import restore
from nanotrain_core.run.stop import REASONS, Rollback, StopRequest
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_engine

NAN = float("nan")


def report(step, loss, **more):
    return StepReport(step, loss, {}, 1.0, 1e-3, 0, 0.0, 0.0, **more)


def feed(guard, losses, first=1):
    """Let the guard see losses; return its requests by step."""
    requests = {step: guard.on_step(report(step, loss)) for step, loss in enumerate(losses, first)}
    return {step: request for step, request in requests.items() if request is not None}


def noisy(count, level=3.0):
    return [level + 0.05 * math.sin(17.0 * step) for step in range(count)]


def test_a_falling_noisy_loss_is_never_bad():
    falling = [8.0 / (1 + step / 20) + 0.3 * math.sin(17.0 * step) for step in range(400)]
    assert feed(Guard(GuardConfig()), falling) == {}


def test_a_spike_that_stays_is_taken_back_to_the_step_before_it_showed():
    guard = Guard(GuardConfig(patience=3))
    requests = feed(guard, [*noisy(50), 9.0, 9.5, 9.2])
    assert {step: request.onset for step, request in requests.items()} == {53: 50}
    assert requests[53].reason.startswith("step 51: the loss rose to 9, from 2.99")


def test_a_spike_that_passes_is_left_alone():
    assert feed(Guard(GuardConfig(patience=3)), [*noisy(50), 9.0, 9.5, *noisy(20)]) == {}


def test_another_weight_of_a_term_is_no_divergence():
    """A phase raises mtp_weight: the sum of the terms jumps, the language model's loss does not."""
    guard = Guard(GuardConfig(patience=1, warmup=5))
    for step in range(1, 41):
        total = 3.0 + (0.1 if step < 20 else 0.8) * 3.0
        seen = attrs.evolve(report(step, total), losses={"lm": 3.0, "mtp": 3.0})
        assert guard.on_step(seen) is None


def test_a_nan_neither_enters_the_history_nor_blinds_it():
    guard = Guard(GuardConfig(patience=2))
    assert feed(guard, [*noisy(50), NAN, *noisy(20), math.inf, *noisy(20)]) == {}
    assert all(map(math.isfinite, guard.good))
    assert {step: request.onset for step, request in feed(guard, [9.0, 9.0], first=93).items()} == {94: 92}
    assert max(guard.good) < 4


def test_steps_skipped_for_a_nan_gradient_are_bad_but_a_loss_scale_may_find_its_level():
    guard = Guard(GuardConfig(patience=2))
    skipped = [guard.on_step(report(step, 3.0, skipped=True, loss_scale=2.0**step)) for step in range(1, 9)]
    assert skipped == [None] * 8
    assert guard.on_step(report(9, 3.0, skipped=True)) is None
    assert guard.on_step(report(10, 3.0, skipped=True)).onset == 8


def test_going_back_has_a_limit_that_a_checkpoint_remembers():
    guard = Guard(GuardConfig(patience=1, max_rollbacks=2))
    feed(guard, noisy(50))
    guard.on_rollback(RollbackReport(60, 50, 40, (0, 8), 2, "test"))
    again = Guard(guard.config)
    again.load_meta(json.loads(json.dumps(guard.meta())))
    with pytest.raises(Diverged, match="given up after 2 rollbacks"):
        again.on_step(report(51, 9.0))


# --- a whole run ----------------------------------------------------------------------------------

GUARDED = {
    "run": {"steps": 40, "log_every": 7},
    "optimizer": {"use": "adamw", "lr": 0.01},
    "checkpoint": {"use": "simple", "every": 5, "keep": 99},
    "monitor": [{"use": "guard", "warmup": 8, "window": 16, "patience": 2}, {"use": "jsonl"}],
}
CASE = Case("parallel", use="ddp", topology={"dp": 2})


class OneStepLRMultiplier:
    """An optimizer whose learning rate is multiplied at one step."""

    def __init__(self, engine, step, factor):
        self.engine, self.behind, self.step_at, self.factor = engine, engine.run.optimizer, step, factor

    def __getattr__(self, name):
        return getattr(self.behind, name)

    def step(self, **options):
        groups = self.behind.inner.param_groups
        before = [group["lr"] for group in groups]
        if self.engine.step + 1 == self.step_at:
            self.step_at = -1  # once
            for group in groups:
                group["lr"] *= self.factor
        stats = self.behind.step(**options)
        for group, lr in zip(groups, before, strict=True):
            group["lr"] = lr
        return stats


def train(folder, *, spike_at=0, resume=None, skipped=(), max_rollbacks=3, guarded=True):
    guard = [dict(GUARDED["monitor"][0], max_rollbacks=max_rollbacks)] if guarded else []
    changes = dict(GUARDED, monitor=[*guard, {"use": "jsonl"}])
    folder.mkdir(exist_ok=True)
    engine = make_engine(CASE, changes, folder=folder, resume=resume)
    optimizer = OneStepLRMultiplier(engine, spike_at, 300.0)
    engine.run = attrs.evolve(engine.run, optimizer=optimizer)
    if resume and skipped:
        load = engine.load

        def load_and_skip(which):
            found = load(which)
            engine.run.feed.skipped = list(skipped)
            return found

        engine.load = load_and_skip
    end = engine.fit()
    weights = {p.placement.name: p.parameter.detach().clone() for p in engine.run.placed}
    return end.step, weights, engine.run.feed.meta()


def same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_a_one_step_lr_multiplier_is_rolled_back_and_its_data_left_out(tmp_path):
    hurt = run_ranks(train, 2, tmp_path / "hurt", spike_at=23)
    (back,) = metrics(tmp_path / "hurt", "rollback")
    assert (back["onset"], back["restored"], back["count"]) == (23, 20, 1)
    # The loss shows the update of step 23 at 24 and 25; the request is agreed on by step 26 or before a save.
    assert back["step"] in (25, 26)
    sequences = 8
    assert back["skipped"] == [22 * sequences, back["step"] * sequences]

    (tmp_path / "again").mkdir()
    whole = tmp_path / "hurt/checkpoints/step-00000020.safetensors"
    skipped = [tuple(back["skipped"])]
    straight = run_ranks(train, 2, tmp_path / "again", resume=str(whole), skipped=skipped)
    for (step, weights, meta), (_, expected, expected_meta) in zip(hurt, straight, strict=True):
        assert step == 40
        same(weights, expected)
        assert meta == expected_meta
        assert meta["taken"] == (40 + back["step"] - 22) * sequences


@pytest.mark.full
def test_a_rollback_comes_with_the_next_step_however_long_the_next_save_is_away(tmp_path):
    """The guard requests to go back at every bad step: also at the one with which all ranks have agreed."""
    run_ranks(train, 2, tmp_path, spike_at=21)  # shows at 22 and 23; saves are at 20 and 25
    (back,) = metrics(tmp_path, "rollback")
    assert (back["onset"], back["step"], back["restored"]) == (21, 24, 20)


def test_a_second_request_takes_nothing_from_the_first():
    """Ranks that know of one go back: none may be left behind, and none may forget how far."""
    stop = StopRequest()
    stop.request_rollback(Rollback(3, "first"))
    stop.agree([0.0] * len(REASONS) + [2.0])
    stop.request_rollback(Rollback(5, "second"))
    assert stop.rollback_agreed
    assert stop.rollback == Rollback(3, "first")
    stop.request_rollback(None)
    assert not stop.rollback_agreed
    assert stop.rollback is None


@pytest.mark.full
def test_a_resume_after_a_rollback_leaves_the_same_data_out(tmp_path):
    hurt = run_ranks(train, 2, tmp_path / "hurt", spike_at=23)
    whole = str(tmp_path / "hurt/checkpoints/step-00000030.safetensors")
    resumed = run_ranks(train, 2, tmp_path / "resumed", resume=whole)
    for (_, weights, meta), (_, expected, expected_meta) in zip(resumed, hurt, strict=True):
        same(weights, expected)
        assert meta == expected_meta
        assert len(meta["skipped"]) == 1


class StopsAfter(Monitor):
    """Requests a stop in the step in which the guard requests to go back."""

    every_step = True

    def __init__(self, step):
        self.step = step

    def on_step(self, report):
        return "stop" if report.step == self.step else None


def test_a_run_that_is_stopped_as_it_goes_back_saves_what_it_leaves_out(tmp_path):
    """Both are agreed on with step 24. The next launch took the data of the bad steps again."""
    engine = RuntimeEngine.from_recipe(
        CASE.alone().recipe(**GUARDED), registry=CASE.registry(), folder=tmp_path
    )
    engine.run = attrs.evolve(engine.run, optimizer=OneStepLRMultiplier(engine, 21, 300.0))
    engine.events.monitors = [*engine.events.monitors, StopsAfter(23)]
    end = engine.fit()
    (back,) = metrics(tmp_path, "rollback")
    assert (back["step"], back["restored"]) == (24, 20)
    assert (end.reason, end.step) == ("stopped", 21)
    again = RuntimeEngine.from_recipe(
        CASE.alone().recipe(**GUARDED), registry=CASE.registry(), folder=tmp_path, resume="latest"
    )
    restore(again)
    assert again.step == 21
    assert again.run.feed.skipped == [tuple(back["skipped"])]


def alone(folder, *, stop_at=0, spike_at=0, resume=None, **changes):
    """Train on one rank; return how it ended, the weights and the state of the data."""
    folder.mkdir(exist_ok=True)
    recipe = CASE.alone().recipe(**{**GUARDED, "run": {"steps": 26, "log_every": 1}, **changes})
    engine = RuntimeEngine.from_recipe(recipe, registry=CASE.registry(), folder=folder, resume=resume)
    engine.run = attrs.evolve(engine.run, optimizer=OneStepLRMultiplier(engine, spike_at, 300.0))
    engine.events.monitors = [*engine.events.monitors, StopsAfter(stop_at)]
    end = engine.fit()
    return (
        end.step,
        {p.placement.name: p.parameter.detach() for p in engine.run.placed},
        engine.run.feed.meta(),
    )


def test_a_stop_where_the_guard_requests_to_go_back_changes_nothing(tmp_path):
    """The request is agreed on with step 24, which the stopped run does not take: its checkpoint has it."""
    _, expected, expected_meta = alone(tmp_path / "straight", spike_at=21)
    assert alone(tmp_path / "stopped", spike_at=21, stop_at=22)[0] == 23
    _, weights, meta = alone(tmp_path / "stopped", resume="latest")
    (back,), (expected_back,) = (metrics(tmp_path / name, "rollback") for name in ("stopped", "straight"))
    assert back["step"] == expected_back["step"] == 24
    same(weights, expected)
    assert meta == expected_meta


def test_retention_keeps_a_checkpoint_from_before_what_the_guard_may_still_roll_back(tmp_path):
    """The save of a stop at step 22, whose update is the bad one, had replaced that of step 20."""
    checkpoint = {"use": "simple", "every": 5, "keep": 1}
    assert alone(tmp_path, stop_at=21, spike_at=22, checkpoint=checkpoint)[0] == 22
    saved = sorted(path.stem for path in (tmp_path / "checkpoints").glob("*.safetensors"))
    assert saved == ["step-00000020", "step-00000022"]
    guard = Guard(GuardConfig(margin=2, warmup=8, patience=9))
    feed(guard, [*noisy(20), 9.0, 9.0, 9.0])
    assert guard.suspect_steps() == 5


@pytest.mark.full  # tests/test_all_monitors.py has it among all others
def test_a_guard_that_has_nothing_to_do_changes_nothing(tmp_path):
    guarded = run_ranks(train, 2, tmp_path / "guarded")
    plain = run_ranks(train, 2, tmp_path / "plain", guarded=False)
    assert metrics(tmp_path / "guarded", "rollback") == []
    for (_, weights, meta), (_, expected, expected_meta) in zip(guarded, plain, strict=True):
        same(weights, expected)
        assert meta == expected_meta
        assert meta["skipped"] == []


@pytest.mark.parametrize(("limit", "text"), [(0, "given up after 0 rollbacks")])
def test_a_run_that_may_not_go_back_is_given_up(tmp_path, limit, text):
    from nanotrain_core.testing.pool import RankFailure

    with pytest.raises(RankFailure, match=text):
        run_ranks(train, 2, tmp_path / "hurt", spike_at=23, max_rollbacks=limit)


def test_without_a_checkpoint_that_is_old_enough_the_run_says_so(tmp_path):
    changes = dict(GUARDED, checkpoint={"use": "simple", "every": 0})
    engine = RuntimeEngine.from_recipe(
        CASE.alone().recipe(**changes), registry=CASE.registry(), folder=tmp_path
    )
    engine.run = attrs.evolve(engine.run, optimizer=OneStepLRMultiplier(engine, 23, 300.0))
    with pytest.raises(Diverged, match="went wrong at step 23 and there is no older complete checkpoint"):
        engine.fit()


def test_requests_carry_a_reason():
    assert Rollback(3, "why").reason == "why"
