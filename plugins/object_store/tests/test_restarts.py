"""Ranks that a launcher has restarted: they wait neither for the store nor for hashes they do not need."""

import attrs
import pytest
from nanotrain_object_store import before_restore, fetch
from nanotrain_object_store.catalogue import look, read_markers
from nanotrain_object_store.store import Store
from nanotrain_object_store.stored import LEFT, hashed
from small_runs import RECIPE, fit

from nanotrain_core.contracts import Monitor, TrainState
from nanotrain_core.engine import RuntimeEngine


class Keeps(Monitor):
    """Has the state of the last step in memory, like memory_snapshots."""

    def __init__(self):
        self.kept = None

    def on_recover(self, restore, at_least):
        if self.kept is None:
            return None
        state = restore.state()
        for block, tensor in zip(state.blocks, self.kept[0], strict=True):
            block.tensor.copy_(tensor)
        return TrainState(state.blocks, *self.kept[1:])

    def on_start(self, run):
        self.first = run.first_step

    def on_step_end(self, end):
        state = end.state()
        self.kept = [b.tensor.detach().clone() for b in state.blocks], state.meta, state.rank_tensors


def restart(folder, url, keeps, *, steps=6):
    """Go on in ``folder`` as if a launcher had started the ranks again; ``keeps`` is asked first."""
    path = folder.with_suffix(".toml")
    path.write_text(
        RECIPE.format(name="small", steps=steps, every=2, url=url, more="", format="simple", keep_here=99)
    )
    engine = RuntimeEngine.from_recipe(path, folder=folder, resume="auto")
    engine.events.monitors = [keeps, *engine.events.monitors]
    engine.restart = attrs.evolve(engine.restart, restarted=True)
    engine.fit()
    return keeps.first


@pytest.fixture
def compared(monkeypatch):
    """The steps that were compared with the store."""
    steps, compare = [], before_restore.compare

    def noting(path, stored, *arguments):
        steps.append(stored.step)
        return compare(path, stored, *arguments)

    monkeypatch.setattr(before_restore, "compare", noting)
    return steps


def test_a_restart_from_memory_does_not_hash_the_checkpoint(tmp_path, compared):
    url, keeps = f"file://{tmp_path / 'store'}", Keeps()
    fit(tmp_path / "run", url, steps=4)
    assert restart(tmp_path / "run", url, keeps) == 4
    assert compared == [4]  # it had nothing in memory
    assert restart(tmp_path / "run", url, keeps, steps=8) == 6
    assert compared == [4]


def test_without_memory_a_damaged_checkpoint_is_fetched_anew(tmp_path, compared, capfd):
    url = f"file://{tmp_path / 'store'}"
    fit(tmp_path / "run", url, steps=4)
    (path,) = (tmp_path / "run" / "checkpoints").glob("step-00000004*")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert restart(tmp_path / "run", url, Keeps()) == 4
    assert path.read_bytes() == whole
    assert compared == [4]
    assert "a damaged checkpoint was set aside" in capfd.readouterr().err


def test_an_intact_checkpoint_that_differs_from_the_store_s_is_kept_and_uploaded(tmp_path, capfd):
    """A run that went back and on without the store had lost its branch to the one that it had left."""
    url = f"file://{tmp_path / 'store'}"
    fit(tmp_path / "run", url, steps=4)
    other = fit(tmp_path / "other", f"file://{tmp_path / 'elsewhere'}", steps=4)  # its recipe has another url
    name = "step-00000004.safetensors"
    own, path = other.folder / "checkpoints" / name, tmp_path / "run/checkpoints" / name
    path.write_bytes(own.read_bytes())
    assert [*fit(tmp_path / "run", url, resume="auto").losses] == [5, 6]
    assert path.read_bytes() == own.read_bytes()
    store = Store(url)
    stored = read_markers(store, look(store))
    assert [each.step for each in stored] == [6, 4, 2]
    assert stored[1].files[name] == hashed(own)
    told = capfd.readouterr().err
    assert "is intact and another than the store's" in told
    assert str(path) in told


def test_a_restart_with_a_checkpoint_on_the_disk_asks_a_store_that_is_down_once(tmp_path, monkeypatch, capfd):
    url, asked = f"file://{tmp_path / 'store'}", []
    fit(tmp_path / "run", url, steps=4)

    def down(store):
        asked.append(store)
        raise ConnectionError("nobody listens")

    monkeypatch.setattr(before_restore, "look", down)
    monkeypatch.setattr(before_restore, "PATIENCE", 1.5)
    assert restart(tmp_path / "run", url, Keeps()) == 4
    assert len(asked) == 1
    assert "the object store does not answer, and the run begins without it" in capfd.readouterr().err
    fit(tmp_path / "run", url, steps=8, resume="auto")
    assert len(asked) > 2  # a user's start waits for it


def test_a_fetch_that_fails_for_the_moment_supersedes_nothing(tmp_path, monkeypatch):
    """The run had gone on from the disk's older checkpoint, and left the newer ones' branch."""
    url = f"file://{tmp_path / 'store'}"
    first = fit(tmp_path / "run", url, steps=4)
    (first.folder / "checkpoints/step-00000004.safetensors").unlink()
    monkeypatch.setattr(fetch, "FIRST", 0.001)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Store, "get", full)
        with pytest.raises(fetch.NotFetched, match=r"step 4 cannot be fetched.* No space left") as told:
            fit(tmp_path / "run", url, resume="latest")
    assert (told.value.exit_code, told.value.restart_helps) == (1, True)
    assert not [*(tmp_path / "store").glob(f"*/{LEFT}")]
    assert [*fit(tmp_path / "run", url, resume="latest").losses] == [5, 6]


def test_a_checkpoint_that_is_damaged_in_the_store_is_passed_over(tmp_path, monkeypatch, capfd):
    url = f"file://{tmp_path / 'store'}"
    first = fit(tmp_path / "run", url, steps=4)
    (first.folder / "checkpoints/step-00000004.safetensors").unlink()
    (path,) = (tmp_path / "store").glob("step-00000004-*/*.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    monkeypatch.setattr(fetch, "FIRST", 0.001)
    assert [*fit(tmp_path / "run", url, resume="latest").losses] == [3, 4, 5, 6]
    assert "a checkpoint could not be fetched" in capfd.readouterr().err


def test_a_store_that_denies_deletes_keeps_no_abandoned_branch(tmp_path, monkeypatch, capfd):
    """Uploads ended with code 7, and a fresh machine resumed from the branch that the run had left."""
    url = f"file://{tmp_path / 'store'}"
    fit(tmp_path / "run", url)

    def denied(store, names):
        if names:
            raise PermissionError("AccessDenied")

    monkeypatch.setattr(Store, "delete", denied)
    fit(tmp_path / "run", url, steps=4, resume="2")
    assert "could not be deleted from the object store" in capfd.readouterr().err
    assert [*fit(tmp_path / "new", url, resume="auto").losses] == [5, 6]
