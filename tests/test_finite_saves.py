"""What is not finite is not saved, what was saved before stays, and odd entries beside it do no harm."""

import math
import os
import stat
from contextlib import nullcontext
from unittest import mock

import attrs
import pytest
import torch
from nanotrain_sharded_ckpt_v2 import listing
from structlog.testing import capture_logs

from nanotrain_core.checkpoint.simple_listing import list_checkpoints
from nanotrain_core.checkpoint.simple_names import saved_steps
from nanotrain_core.contracts import Monitor, StepStats
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.errors import Diverged, PluginError
from nanotrain_core.run.divergence import SkippedSteps
from nanotrain_core.run.evaluation import evaluate
from nanotrain_core.run.step_readback import StepFlags
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import rank

DDP = {"parallel": [{"use": "ddp"}]}


class Poison(Monitor):
    """Makes a number of a weight NaN before the last save, on the last rank."""

    STEP = 6

    def on_start(self, run):
        self.run = run

    def on_before_save(self, step):
        if step == self.STEP and self.run.rank == self.run.world_size - 1:
            with torch.no_grad():
                self.run.placed[1].parameter.view(-1)[0] = torch.nan


def engine(folder, ranks=1, callbacks=(), **checkpoint):
    checkpoint = {"use": "simple", "every": 2, "keep": 2, **checkpoint}
    overrides = {"checkpoint": checkpoint, "run": {"steps": 6, "log_every": 1}, **DDP}
    overrides["evaluation"] = {"every": 1, "sequences": 8}
    case = Case("topology", use="grid", topology={"dp": ranks}, overrides=overrides)
    return RuntimeEngine.from_recipe(
        case.recipe(),
        registry=case.registry(),
        rank=rank() if ranks > 1 else 0,
        folder=folder,
        callbacks=callbacks,
    )


def told(folder, ranks, **checkpoint):
    with pytest.raises(Diverged) as told:
        engine(folder, ranks, [Poison()], **checkpoint).fit()
    return str(told.value)


@pytest.mark.parametrize(("use", "ranks"), [("simple", 1), ("sharded_v2", 2)])
def test_a_weight_that_is_not_finite_ends_the_run_and_older_checkpoints_stay(tmp_path, use, ranks):
    texts = run_ranks(told, ranks, tmp_path, ranks, use=use)
    assert len(set(texts)) == 1
    assert texts[0].startswith(f"after step 6 layers.0.attn_norm.weight is not finite on rank {ranks - 1}, ")
    list_of = list_checkpoints if use == "simple" else listing.list_checkpoints
    assert [saved.step for saved in list_of(tmp_path / "checkpoints")] == [2, 4]


class Parts(Poison):
    """Changes a weight on the last rank, as training that averages weights only now and then does."""

    def on_before_save(self, step):
        if self.run.rank == self.run.world_size - 1:
            with torch.no_grad():
                self.run.placed[1].parameter.view(-1)[0] += 1


def warned(folder, ranks, callbacks):
    with capture_logs() as logs:
        engine(folder, ranks, [each() for each in callbacks]).fit()
    return [log["weight"] for log in logs if log["event"].startswith("a weight differs between ranks")]


def test_a_weight_that_differs_between_replicas_is_reported_at_the_first_save(tmp_path):
    """A checkpoint has that of one rank, and which one depended on the format."""
    assert run_ranks(warned, 2, tmp_path / "parts", 2, [Parts]) == [["layers.0.attn_norm.weight"], []]
    assert run_ranks(warned, 2, tmp_path / "same", 2, []) == [[], []]


def knowing(folder):
    """Train on data that keep something of their own on each rank; return why nothing is saved."""
    made = engine(folder, 2)
    meta = made.run.feed.meta
    made.run.feed.meta = lambda: {**meta(), "seen": rank()}
    with pytest.raises(PluginError) as told:
        made.fit(steps=4)
    return str(told.value)


def test_a_position_in_the_data_that_differs_between_ranks_is_refused(tmp_path):
    told = run_ranks(knowing, 2, tmp_path)
    assert told[0].startswith("'seen' in the meta of the data is 0 on rank 0 and 1 on rank 1, ")


def skipping(folder, skipped, steps=6, callbacks=(), resume=None, **checkpoint):
    """Train with these steps skipped; return the steps that are saved."""
    made, saved = engine(folder, callbacks=callbacks, **{"keep": 9, **checkpoint}), []
    made.resume = resume
    real = made.run.optimizer.step

    def step(**options):
        if made.step + 1 in skipped:
            return StepStats(torch.tensor(torch.inf), skipped=True)
        return real(**options)

    made.run.optimizer.step = step
    try:
        made.fit(steps=steps)
    finally:
        saved += saved_steps(folder / "checkpoints")
    return saved


def test_steps_that_are_skipped_put_a_save_off_to_the_next_that_is_not(tmp_path):
    assert skipping(tmp_path / "none", ()) == [2, 4, 6]
    assert skipping(tmp_path / "some", (4,)) == [2, 5, 6]


class Infects(Poison):
    """Makes it NaN before the save of step 4, and well again after it, as a rollback would."""

    STEP = 4

    def on_step(self, report):
        if report.step == 5:
            with torch.no_grad():
                self.run.placed[1].parameter.view(-1)[0] = 1.0


def test_a_save_that_is_not_the_last_waits_until_weights_are_finite_again(tmp_path, capfd):
    """The monitor guard may go back to a checkpoint: the run must not end before it could."""
    made = engine(tmp_path, callbacks=[Infects()], keep=9)
    assert made.fit().step == 6
    assert saved_steps(tmp_path / "checkpoints") == [2, 6]
    assert "after step 4 layers.0.attn_norm.weight is not finite on rank 0" in "".join(capfd.readouterr())


def test_frozen_parameters_may_hold_an_infinity(tmp_path):
    made = engine(tmp_path)
    with torch.no_grad():
        made.run.placed[1].parameter.requires_grad_(requires_grad=False).view(-1)[0] = -torch.inf
    saved = []
    made.saves = mock.Mock()
    made.saves.begin = lambda step, state, *, last: saved.append(step)
    made.events.before_save, made._first = lambda step: None, 0
    made._save()
    assert saved == [0]


def test_ranks_are_compared_once_though_the_first_save_is_tried_again(tmp_path, monkeypatch):
    """A postponed save is tried after each step, and each had warned."""
    monkeypatch.setattr("nanotrain_core.run.divergence.differing_weight", lambda *_: "norm")
    made = engine(tmp_path)
    made.saves = mock.Mock(begun=False)
    made.saves.begin = lambda *_, last: setattr(made.saves, "begun", True)
    made.events.before_save, made._first = lambda step: None, 0
    numbers = made.run.placed[1].parameter.detach().view(-1)
    with capture_logs() as logs:
        for value in (torch.nan, torch.nan, 0.0, 0.0):
            numbers[0] = value
            made._save()
    texts = [log["event"].partition(",")[0] for log in logs]
    assert texts == [
        *["nothing is saved for now"] * 2,
        "a weight differs between ranks that sum its gradient",
    ]


@pytest.mark.full_cases("skipped1-saved1-the last step, 6, was skipped")
@pytest.mark.parametrize(
    ("skipped", "saved", "message"),
    [
        ((4, 5, 6), [2, 6], "the last 3 of 6 steps were skipped"),
        ((6,), [2, 4, 6], "the last step, 6, was skipped"),
    ],
)
def test_a_run_that_ends_in_skipped_steps_is_not_done(tmp_path, skipped, saved, message):
    with pytest.raises(Diverged, match=message):
        skipping(tmp_path, skipped)
    assert saved_steps(tmp_path / "checkpoints") == saved
    again = engine(tmp_path, keep=9)
    again.resume = "latest"
    with pytest.raises(Diverged, match=message):
        again.fit(steps=6)
    more = engine(tmp_path, keep=9)
    more.resume = "latest"
    assert more.fit(steps=7).reason == "done"


@pytest.mark.parametrize(("last", "diverged"), [(2.0, False), (1.0, True)])
def test_steps_skipped_on_the_way_to_the_lowest_loss_scale_are_no_divergence(last, diverged):
    """Whether one is good there is known only after a step at it."""
    skipped = SkippedSteps()
    skipped.record(StepFlags(1, skipped=True, grad_norm=math.inf, requests=[]), mock.Mock())
    with pytest.raises(Diverged) if diverged else nullcontext():
        skipped.check_last_steps(1, last, stopped=False)


@pytest.mark.parametrize("use", ["simple", "sharded_v2"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_checkpoint_with_what_is_not_finite_is_not_whole(tmp_path, monkeypatch, use, value):
    """As of a version that did not look before it saved; moments of an optimizer are its own business."""
    monkeypatch.setattr("nanotrain_core.engine.may_save", lambda *_, last: True)
    made = engine(tmp_path, use=use)
    with torch.no_grad():
        made.run.placed[1].parameter.view(-1)[0] = value
    with pytest.raises(Diverged, match="the last step, 1, was skipped"):  # after its save
        made.fit(steps=1)
    list_of = list_checkpoints if use == "simple" else listing.list_checkpoints
    (saved,) = list_of(tmp_path / "checkpoints")
    problems = saved.verify()
    assert problems
    assert "layers.0.attn_norm.weight" in problems[0]
    assert "is not finite" in problems[0]
    assert not any("exp_avg" in problem for problem in problems)


@pytest.mark.full_cases("simple-kept0")
@pytest.mark.parametrize(("use", "kept"), [("simple", [4, 10]), ("sharded_v2", [4, 8, 10])])
def test_the_newest_checkpoint_that_was_evaluated_stays(tmp_path, monkeypatch, use, kept):
    """Weights may be finite and worth nothing: then those before would be rotated out, as NaN once did."""
    real = evaluate

    def worthless(engine, *sums):
        report = real(engine, *sums)
        return attrs.evolve(report, loss=torch.nan) if engine.step > 5 else report

    monkeypatch.setattr("nanotrain_core.engine.evaluate", worthless)
    made = engine(tmp_path, use=use, keep=1)
    assert made.run.evaluation.every == 1
    made.fit(steps=10)
    list_of = list_checkpoints if use == "simple" else listing.list_checkpoints
    assert [saved.step for saved in list_of(tmp_path / "checkpoints")] == kept


@pytest.mark.parametrize(("use", "kept"), [("simple", [4, 6]), ("sharded_v2", [2, 4, 6])])
def test_a_save_after_skipped_steps_deletes_nothing(tmp_path, use, kept):
    """A run that ends, or is stopped there, saves all the same, and the guard may go back once it resumes."""
    with pytest.raises(Diverged, match="the last 2 of 6 steps were skipped"):
        skipping(tmp_path, (5, 6), use=use, keep=1)
    list_of = list_checkpoints if use == "simple" else listing.list_checkpoints
    assert [saved.step for saved in list_of(tmp_path / "checkpoints")] == kept


class Stops(Monitor):
    """Asks for the end of the run in step 4."""

    def on_step(self, report):
        return "stop" if report.step == 4 else None


def test_a_save_that_was_put_off_is_made_after_a_resume(tmp_path):
    """When ranks agree on a rollback depends on it: a run that was stopped ends as if it had not been."""
    assert skipping(tmp_path, (4,), callbacks=[Stops()]) == [2, 4]
    assert skipping(tmp_path, (4,), resume="latest") == [2, 4, 5, 6]


ODD = {
    "simple": (
        "step-00000002 (copy).safetensors",
        "step-00000009.safetensors.bak",
        "step-x.safetensors",
        "step-000000022.safetensors",
        "step-٠٠٠٠٠٠٠٩.safetensors",
    ),
    "sharded_v2": ("step-00000002 (copy)", "step-x", "step-000000022", "step-٠٠٠٠٠٠٠٩"),
}


@pytest.mark.full_cases("simple")
@pytest.mark.parametrize("use", ODD)
def test_odd_entries_beside_checkpoints_are_left_out_by_name(tmp_path, use, capfd):
    engine(tmp_path, use=use).fit(steps=2)
    folder = tmp_path / "checkpoints"
    for name in ODD[use]:
        (folder / name).write_text("") if use == "simple" else (folder / name).mkdir()
    (folder / ".x.tmp").mkdir()
    (folder / ".tmp-00000008-abc").write_text("")
    suffix = ".safetensors" if use == "simple" else ""
    (folder / f"step-00000008{suffix}").symlink_to(tmp_path / "nowhere")
    (folder / f"step-00000007{suffix}").mkdir() if use == "simple" else (folder / "step-00000007").write_text(
        ""
    )
    again = engine(tmp_path, use=use)
    again.resume = "latest"
    assert again.fit(steps=8).step == 8
    err = capfd.readouterr().err
    for name in (*ODD[use], f"step-00000008{suffix}", f"step-00000007{suffix}"):
        assert str(folder / name) in err
    list_of = list_checkpoints if use == "simple" else listing.list_checkpoints
    assert [saved.step for saved in list_of(folder)][-1] == 8


def test_a_checkpoint_has_the_mode_of_any_new_file(tmp_path):
    mask = os.umask(0o027)
    try:
        engine(tmp_path).fit(steps=1)
    finally:
        os.umask(mask)
    (saved,) = (tmp_path / "checkpoints").glob("step-*")
    assert stat.S_IMODE(saved.stat().st_mode) == 0o640


def saved_or_refused(made, folder, apart):
    """Train; return what is saved, or why nothing is where ranks are apart."""
    with nullcontext() if not apart else pytest.raises(PluginError) as told:
        made.fit()
    return str(told.value) if apart else saved_steps(folder / "checkpoints")


def scaled(folder, apart):
    """Train with a scalar in the state of one master."""
    made = engine(folder, 2)
    scale = torch.tensor(1.0 + apart * rank())
    made.run.optimizer.master_shards[0].master.state = lambda: {"scale": scale}
    return saved_or_refused(made, folder, apart)


def test_a_scalar_that_ranks_have_different_values_of_is_refused_by_name(tmp_path):
    texts = run_ranks(scaled, 2, tmp_path / "apart", 0.5)
    assert len(set(texts)) == 1
    assert texts[0].startswith("state 'scale' of embed.weight is 1 on rank 0 and 1.5 on rank 1, ")
    assert saved_steps(tmp_path / "apart" / "checkpoints") == []
    assert run_ranks(scaled, 2, tmp_path / "alike", 0.0)[0] == [4, 6]


def remembering(folder, apart):
    """Train with a maximum in the loss scale's ``meta``."""
    made = engine(folder, 2)
    made.run.loss_scale.meta = lambda: {"largest": [1.0 + apart * rank()]}
    return saved_or_refused(made, folder, apart)


def test_a_meta_that_differs_between_ranks_is_refused_by_its_key(tmp_path):
    texts = run_ranks(remembering, 2, tmp_path / "apart", 0.5)
    assert len(set(texts)) == 1
    assert texts[0].startswith(
        "'largest' in the meta of the loss scale is [1.0] on rank 0 and [1.5] on rank 1, "
    )
    assert saved_steps(tmp_path / "apart" / "checkpoints") == []
    assert run_ranks(remembering, 2, tmp_path / "alike", 0.0)[0] == [4, 6]
