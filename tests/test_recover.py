"""A run that was started again goes on from what a monitor has kept of it, and counts that as progress."""

import shutil

import attrs
import pytest
import torch
from test_before_restore import RECIPE

from nanotrain_core.contracts import Monitor, TrainState
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.launch import temporary
from nanotrain_core.launch.restart_info import restart_of
from nanotrain_core.launch.restarts import MOST_IN_VAIN, Restarts
from nanotrain_core.recipe import load_recipe
from nanotrain_core.registry.registry import load_plugins
from nanotrain_core.watch.scratch import RECOVERABLE


class Keeps(Monitor):
    """Copies the state of a step, and gives it back."""

    def __init__(self, kept=None, at=3):
        self.at = at
        self.kept, self.asked, self.losses, self.saved = kept, [], {}, []

    def on_recover(self, restore, at_least):
        self.asked.append(at_least)
        if self.kept is None:
            return None
        state = restore.state()
        for block, tensor in zip(state.blocks, self.kept[0], strict=True):
            block.tensor.copy_(tensor)
        return TrainState(state.blocks, self.kept[1], self.kept[2])

    def on_start(self, run):
        self.first = run.first_step

    def on_step(self, report):
        self.losses[report.step] = report.loss

    def on_checkpoint(self, report):
        self.saved.append(report.step)

    def on_step_end(self, end):
        if end.step == self.at:
            state = end.state()
            self.kept = [b.tensor.detach().clone() for b in state.blocks], state.meta, state.rank_tensors


def fit(tmp_path, monitor, *, again, resume="auto", recipe=RECIPE):
    (tmp_path / "recipe.toml").write_text(recipe)
    engine = RuntimeEngine.from_recipe(
        tmp_path / "recipe.toml", folder=tmp_path / "run", resume=resume, callbacks=[monitor]
    )
    engine.restart = attrs.evolve(engine.restart, restarted=again)
    engine.fit()
    return [placed.parameter.detach().clone() for placed in engine.run.placed]


def test_it_goes_on_from_what_was_kept_and_ends_with_the_same_bits(tmp_path):
    """Checkpoints are of steps 2 and 4: that of step 3 is in memory alone."""
    keeps = Keeps()
    weights = fit(tmp_path, keeps, again=False, resume=None)
    (tmp_path / "run" / "checkpoints" / "step-00000004.safetensors").unlink()
    goes_on = Keeps(keeps.kept)
    again = fit(tmp_path, goes_on, again=True)
    assert (goes_on.first, goes_on.asked, goes_on.losses) == (3, [2], {4: keeps.losses[4]})
    assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))


def test_a_new_run_that_is_restarted_before_it_has_saved_goes_on_from_what_was_kept(tmp_path):
    keeps = Keeps(at=1)
    fit(tmp_path, keeps, again=False, resume=None)
    shutil.rmtree(tmp_path / "run")
    fit(tmp_path, goes_on := Keeps(keeps.kept), again=True, resume=None)
    assert (goes_on.first, goes_on.asked) == (1, [0])


@pytest.mark.parametrize("again", [True, False])
def test_a_load_follows_where_nothing_was_kept_or_a_person_starts_the_run(tmp_path, again):
    keeps = Keeps()
    fit(tmp_path, keeps, again=False, resume=None)
    (tmp_path / "run" / "checkpoints" / "step-00000004.safetensors").unlink()
    goes_on = Keeps(None if again else keeps.kept)
    fit(tmp_path, goes_on, again=again)
    assert (goes_on.first, goes_on.asked) == (2, [2] if again else [])


def test_a_checkpoint_that_was_on_its_way_is_made_up_for(tmp_path):
    """The run died before the save of step 3, which was due, was complete."""
    keeps = Keeps()
    fit(tmp_path, keeps, again=False, resume=None)
    for path in (tmp_path / "run" / "checkpoints").glob("step-*"):
        path.unlink()
    recipe = RECIPE.replace("steps = 4", "steps = 7").replace("every = 2", "every = 3")
    goes_on = Keeps(keeps.kept)
    fit(tmp_path, goes_on, again=True, recipe=recipe)
    assert (goes_on.first, goes_on.saved) == (3, [4, 6, 7])


def test_a_checkpoint_of_an_earlier_step_that_was_on_its_way_is_made_up_for(tmp_path):
    """The save of step 4 was still being written when the run died after step 5."""
    recipe = RECIPE.replace("steps = 4", "steps = 9").replace("every = 2", "every = 4")
    keeps = Keeps(at=5)
    fit(tmp_path, keeps, again=False, resume=None, recipe=recipe)
    for path in (tmp_path / "run" / "checkpoints").glob("step-*"):
        path.unlink()
    goes_on = Keeps(keeps.kept)
    fit(tmp_path, goes_on, again=True, recipe=recipe)
    assert (goes_on.first, goes_on.saved) == (5, [6, 8, 9])


def test_a_run_that_died_in_its_last_save_saves_again(tmp_path):
    keeps = Keeps()
    fit(tmp_path, keeps, again=False, resume=None, recipe=RECIPE.replace("steps = 4", "steps = 3"))
    for path in (tmp_path / "run" / "checkpoints").glob("step-*"):
        path.unlink()
    goes_on = Keeps(keeps.kept)
    fit(tmp_path, goes_on, again=True, recipe=RECIPE.replace("steps = 4", "steps = 3"))
    assert (goes_on.first, goes_on.saved, goes_on.losses) == (3, [3], {})


@pytest.mark.full
def test_state_that_was_kept_of_a_later_step_is_progress(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    restarts = Restarts(tmp_path, 99, lambda: False, lambda cause: cause)

    def failed(step):
        if step:
            (tmp_path / RECOVERABLE).write_text(str(step))
        return restarts.again({0: -9}, 1, None)

    assert all(failed(step) for step in range(3 * MOST_IN_VAIN))
    assert "(1 of 99) from what is kept of step 14, or where it began" in capsys.readouterr().err
    again = [failed(14) for _ in range(MOST_IN_VAIN + 1)]
    assert again == [True] * (MOST_IN_VAIN - 1) + [False] * 2


def test_what_ranks_ask_for_is_deleted_with_their_launcher(tmp_path, monkeypatch):
    scratch, kept, other = (tmp_path / name for name in ("scratch", "kept", "other"))
    for folder in (scratch, kept, other):
        folder.mkdir()
        (folder / "file").touch()
    recipe = load_recipe("laptop.toml")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv(temporary.NOTES, str(tmp_path))
    monkeypatch.setattr(temporary, "_notes", tmp_path)
    restart = restart_of(scratch, "12.5", recipe, 4, load_plugins())
    restart.delete_at_end(kept)
    with monkeypatch.context() as no_flush:  # which every step would wait for
        no_flush.delattr("nanotrain_core.run.files.flush")
        restart.recoverable(7)
    assert ((scratch / RECOVERABLE).read_text(), restart.failed_at, restart.restarted) == ("7", 12.5, True)
    temporary.delete_named()
    assert (kept.exists(), other.exists()) == (False, True)
    shutil.rmtree(scratch)
    restart.recoverable(8)  # like a full disk: a monitor that failed here would keep no further snapshots


def test_where_the_launcher_was_killed_the_next_start_of_any_run_does(tmp_path, monkeypatch):
    kept, place = tmp_path / "kept", tmp_path / "tmp"
    kept.mkdir()
    notes = place / f"{temporary.prefix()}x"
    notes.mkdir(parents=True)
    (notes / temporary.LOCK).touch()
    monkeypatch.setenv(temporary.NOTES, str(notes))
    restart_of(tmp_path, None, load_recipe("laptop.toml"), 1, load_plugins()).delete_at_end(kept)
    temporary.sweep(place, tmp_path)
    assert not kept.exists()
    assert [*place.iterdir()] == []


def test_identity_changes_with_recipe_ranks_and_code(tmp_path):
    registry, recipe = load_plugins(), load_recipe("laptop.toml")

    def identity(recipe, ranks):
        return restart_of(None, None, recipe, ranks, registry).identity()

    before = identity(recipe, 4)
    other = load_recipe("laptop.toml", overrides=["run.seed=5"])
    assert {key for key, found in identity(other, 4).items() if before[key] != found} == {"the recipe"}
    assert {key for key, found in identity(recipe, 2).items() if before[key] != found} == {
        "the number of ranks"
    }
    assert {"the code of nanotrain-core", "the version of torch"} <= before.keys()
