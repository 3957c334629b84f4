"""A resume that is refused leaves the run as it was: in memory, and in its folder."""

import attrs
import pytest
import torch

from nanotrain_core.checkpoint.simple import open_simple_weights
from nanotrain_core.contracts import Monitor
from nanotrain_core.errors import CheckpointError, NanotrainError, UnfitCheckpoint
from nanotrain_core.run.train_state import capture_state, load_checkpoint
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine
from nanotrain_core.testing.saving import load, open_state, save_steps

CASE = Case("optimizer", use="adamw")


def engine(folder, kind, changes, **options):
    tables = {"run": {"steps": 4}, "checkpoint": {"use": kind, "every": 1, "keep": 9}}
    for name, table in changes.items():
        tables[name] = {**tables.get(name, {}), **table} if isinstance(table, dict) else table
    return make_engine(CASE, tables, folder=folder, **options)


@pytest.mark.full_cases(
    "changes0-another model: model.norm_eps is-simple",
    "changes1-the checkpoint was trained on other data-sharded_v2",
    "changes2-the checkpoint was trained on other data-simple",
    "changes3-expected BF16-sharded_v2",
    "changes4-exp_avg-simple",
)
@pytest.mark.parametrize("kind", ["simple", "sharded_v2"])
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": {"norm_eps": 0.1}}, "another model: model.norm_eps is"),
        ({"run": {"seed": 8}}, "the checkpoint was trained on other data"),
        ({"batch": {"length": 4}}, "the checkpoint was trained on other data"),
        ({"precision": {"use": "bf16"}}, "expected BF16"),
        ({"optimizer": {"use": "sgd"}}, "exp_avg"),
    ],
)
def test_by_another_model_or_other_data(tmp_path, kind, changes, text):
    engine(tmp_path, kind, {}).fit()
    other = engine(tmp_path, kind, changes, resume="2")
    before = [placed.parameter.detach().clone() for placed in other.run.placed]
    with pytest.raises(NanotrainError, match=text):
        other.fit()
    assert (other.step, other.run.feed.tokens) == (0, 0)
    for placed, old in zip(other.run.placed, before, strict=True):
        assert torch.equal(placed.parameter, old), placed.placement.name
    assert other.run.checkpoint.steps() == [1, 2, 3, 4]
    again = engine(tmp_path, kind, {}, resume="2")
    again.fit()
    assert again.run.checkpoint.steps() == [1, 2, 3, 4]
    assert len(list((tmp_path / "checkpoints").glob("superseded-*/*"))) == 2


@pytest.mark.full_cases("model-sharded_v2", "derived-sharded_v2", "precision-simple", "optimizer-sharded_v2")
@pytest.mark.parametrize("kind", ["simple", "sharded_v2"])
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": {"layers": 3}}, "of another model: model.layers is 2 there and 3 in this recipe$"),
        (
            {"model": {"width": 40}},
            "another model: model.width is 32 there and 40 in this recipe; model.head_size",
        ),
        (
            {"precision": {"use": "bf16"}},
            "another recipe: precision.use is 'fp64' there and 'bf16' in this recipe",
        ),
        (
            {"optimizer": {"use": "adamw", "ema_decay": 0.9, "lr": 0.5}},
            "ema/embed.weight .*: optimizer.ema_decay is 0.0 there and 0.9 in this recipe. `--weights",
        ),
    ],
    ids=["model", "derived", "precision", "optimizer"],
)
def test_by_a_recipe_with_other_tensors_whose_keys_are_named(tmp_path, kind, changes, text):
    """It named a tensor alone, and a model of three layers by one of its weights."""
    engine(tmp_path, kind, {}).fit()
    with pytest.raises(CheckpointError, match=text):
        engine(tmp_path, kind, changes, resume="2").fit()


def test_an_error_of_reading_says_nothing_of_another_recipe(tmp_path):
    """That of a checkpoint which would fit, had its file been readable: other weights would not help."""
    engine(tmp_path, "simple", {}).fit()
    other = engine(tmp_path, "simple", {"optimizer": {"use": "adamw", "ema_decay": 0.9}}, resume="2")
    whole = other.run.checkpoint.load

    def unreadable(which, state):
        try:
            return whole(which, state)
        except UnfitCheckpoint:
            raise CheckpointError("step-00000002.safetensors cannot be read: Input/output error") from None

    other.run.checkpoint.load = unreadable
    with pytest.raises(CheckpointError, match=r"cannot be read: Input/output error$"):
        other.fit()


DDP, LORA = {"use": "ddp"}, {"use": "lora"}


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (
            {"parallel": [{"use": "tp"}, {"use": "cp"}, {"use": "recompute"}, DDP]},
            {"parallel": [{"use": "fsdp2"}], "precision": {"use": "bf16"}},
            "recipe: precision.use is 'fp64' there and 'bf16' in this recipe. `--weights",
        ),
        (
            {},
            {"optimizer": {"use": "zero12", "ema_decay": 0.9}},
            "optimizer.use is 'adamw' there and 'zero12' in this recipe; optimizer.ema_decay is 0.0 there",
        ),
        ({"parallel": [DDP, LORA]}, {"parallel": [DDP]}, "another recipe: parallel.lora is only there. `"),
        ({}, {"parallel": [DDP, LORA]}, "another recipe: parallel.lora is only in this recipe. `--weights"),
    ],
    ids=["precision", "optimizer", "without lora", "with lora"],
)
def test_wrappers_that_add_no_parameters_are_no_reason(tmp_path, before, after, text):
    """Any layout opens a checkpoint: they were named first, and the reason was among the ones left out."""
    engine(tmp_path, "simple", before).fit()
    with pytest.raises(CheckpointError, match=text):
        engine(tmp_path, "simple", after, resume="2").fit()


def test_a_run_that_goes_on_from_elsewhere_sets_all_kinds_aside(tmp_path):
    """A format knows its own checkpoints: those of another one had stayed, and were taken for the newest."""
    engine(tmp_path / "a", "sharded_v2", {}).fit()
    engine(tmp_path / "b", "simple", {}).fit()
    other, here = tmp_path / "b/checkpoints/step-00000002.safetensors", tmp_path / "a/checkpoints"
    engine(tmp_path / "a", "simple", {}, resume=str(other)).fit()
    names = [f"step-{step:08d}.safetensors" for step in (3, 4)]
    assert sorted(path.name for path in here.glob("step-*")) == names
    assert len(list(here.glob("superseded-*/step-????????"))) == 4


def test_a_run_that_goes_back_sets_later_steps_of_all_kinds_aside(tmp_path):
    engine(tmp_path, "sharded_v2", {}).fit()
    for name in ("step-00000002.other", "step-00000009.other", "step-00000009 (copy).other"):
        (tmp_path / "checkpoints" / name).touch()
    engine(tmp_path, "sharded_v2", {}, resume="2").fit()
    kept = sorted(path.name for path in tmp_path.glob("checkpoints/*.other"))
    assert kept == ["step-00000002.other", "step-00000009 (copy).other"]
    assert [path.name for path in tmp_path.glob("checkpoints/superseded-*/*.other")] == [
        "step-00000009.other"
    ]


def test_after_its_progress_was_applied(tmp_path, monkeypatch):
    """The run had the step and the position in the data of a checkpoint that it had refused."""
    engine(tmp_path, "simple", {}).fit()
    other = engine(tmp_path, "simple", {}, resume="2")
    monkeypatch.setattr("nanotrain_core.checkpoint.simple.left_over", lambda *_: ["planted"])
    with pytest.raises(NanotrainError, match="planted"):
        other.fit()
    assert (other.step, other.run.feed.tokens) == (0, 0)


@pytest.mark.parametrize("resume", ["latest", "2", "elsewhere"])
def test_without_the_run_folder(resume):
    """It had trained from random weights."""
    with pytest.raises(CheckpointError, match=f"resume = '{resume}' needs the run folder: pass folder="):
        make_engine(CASE, {"run": {"steps": 1}}, resume=resume).fit()
    assert make_engine(CASE, {"run": {"steps": 1}}, resume="auto").fit().step == 1


@pytest.mark.parametrize("kind", ["simple", "sharded_v2"])
def test_steps_of_more_digits_are_later_ones(tmp_path, kind):
    """As text ``step-100000000`` comes before ``step-99999999``, and stayed in place."""
    case = Case("checkpoint", use=kind, config={"keep": 9})
    save_steps(case, tmp_path, [99_999_999, 100_000_000])
    assert load(case, tmp_path, "99999999").meta["step"] == 99_999_999
    checkpoint, _ = open_state(case, tmp_path)
    assert checkpoint.steps() == [99_999_999]


def test_the_newest_weights_of_a_folder_are_those_of_the_highest_step(tmp_path):
    """As text ``step-99999999`` comes after ``step-100000000``, and ``step-best`` after both."""
    save_steps(Case("checkpoint", use="simple", config={"keep": 9}), tmp_path, [99_999_999, 100_000_000])
    newest = tmp_path / "step-100000000.safetensors"
    (tmp_path / "step-best.safetensors").write_bytes(newest.read_bytes())
    with pytest.raises(CheckpointError, match=f"^{newest} does not say of which model its weights are"):
        open_simple_weights(tmp_path)


class Counts(Monitor):
    """A monitor with state."""

    counted = 1

    def meta(self):
        return {"counted": self.counted}

    def load_meta(self, meta):
        self.counted = meta["counted"]


def test_what_a_damaged_checkpoint_said_is_forgotten_when_an_older_one_is_loaded(tmp_path, monkeypatch):
    """A format may find a file damaged after it had the state accepted."""
    counts = Counts()
    resumed = engine(tmp_path, "simple", {}, callbacks=[counts])
    state = capture_state(resumed)
    older, newer = ({**state.meta, "monitors": monitors} for monitors in ({}, {"Counts": {"counted": 9}}))

    def load(which, state):
        state.accept(newer)
        assert counts.counted == 9
        state.accept(older)
        return attrs.evolve(state, meta=older)

    monkeypatch.setattr(resumed.run.checkpoint, "load", load)
    assert load_checkpoint(resumed, "latest")
    assert counts.counted == 1
