"""Runs whose checkpoints are in an S3 server of this process."""

import shutil

import pytest
import torch
from small_runs import end, fit, looking_at_uploads, steps_in

from nanotrain_core.errors import CheckpointError, NanotrainError
from nanotrain_core.run.stop import Rollback


def assert_same_end(one, other):
    for name, weight in one.weights().items():
        assert torch.equal(weight, other.weights()[name]), name


@pytest.mark.parametrize("use", ["simple"])
def test_a_run_without_its_folder_goes_on_from_the_store(server, tmp_path, use):
    """Bitwise: losses and weights are those of the run that was never broken off."""
    through = fit(tmp_path / "through", server.url("through"), use=use)
    fit(tmp_path / "one", server.url("p"), use=use, after={4: lambda: "stop"})
    assert steps_in(server, "p")[0][-1] == 4
    shutil.rmtree(tmp_path / "one")
    resumed = fit(tmp_path / "one", server.url("p"), use=use, resume="auto")
    assert resumed.losses == {step: through.losses[step] for step in (5, 6)}
    assert_same_end(resumed, through)
    assert steps_in(server, "p")[0][-1] == 6


@pytest.mark.full
def test_what_is_uploaded_is_what_is_on_the_disk(server, tmp_path):
    ran = fit(tmp_path / "one", server.url("p"), use="sharded_v2")
    (entry,) = {key.split("/")[1] for key in server.names() if "step-00000006-" in key}
    for path in (ran.folder / "checkpoints" / "step-00000006").iterdir():
        key = f"p/{entry}/step-00000006/{path.name}"
        assert server.client.get_object(Bucket=server.bucket, Key=key)["Body"].read() == path.read_bytes()


@pytest.mark.full
def test_large_files_are_uploaded_in_parts(server, tmp_path):
    """At the least size that S3 has for them."""
    from nanotrain_object_store.fetch import fetch
    from nanotrain_object_store.store import Store
    from nanotrain_object_store.stored import Stored, hashed

    large = tmp_path / "large"
    large.write_bytes(torch.arange(3 * 2**20, dtype=torch.int32).numpy().tobytes())
    store = Store(server.url("p"), part_mib=5.0)
    store.put(large, "step-00000001-00000000/step-00000001/large")
    parts = [query for method, path, query in server.requests if method == "PUT" and "partNumber" in query]
    assert len(parts) == 3
    stored = Stored(
        entry="step-00000001-00000000",
        step=1,
        run="r",
        name="step-00000001",
        folder=True,
        files={"large": hashed(large)},
    )
    assert fetch(store, stored, ["large"], tmp_path / "back") == ""
    assert (tmp_path / "back" / "large").read_bytes() == large.read_bytes()


@pytest.mark.full
def test_the_newer_of_both_tiers_is_taken(server, tmp_path):
    """What is on the disk alone, since the store was down at the end."""
    fit(tmp_path / "one", server.url("p"), steps=4)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    fit(tmp_path / "one", server.url("p"), steps=8, resume="auto")
    newer = fit(tmp_path / "two", server.url("p"), steps=10, resume="auto")
    assert [*newer.losses] == [9, 10]  # the store's 8, not the 4 of this folder


@pytest.mark.full
def test_a_checkpoint_asked_for_by_step_is_fetched(server, tmp_path):
    through = fit(tmp_path / "one", server.url("p"), more="keep = 9", every=1)
    step = steps_in(server, "p")[0][0]
    back = fit(tmp_path / "two", server.url("p"), every=1, resume=str(step))
    assert back.losses == {each: through.losses[each] for each in range(step + 1, 7)}


@pytest.mark.full
def test_a_damaged_file_on_the_disk_is_fetched_anew(server, tmp_path, capfd):
    first = fit(tmp_path / "one", server.url("p"), steps=4)
    (path,) = (tmp_path / "one" / "checkpoints").glob("step-00000004*")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    fit(tmp_path / "one", server.url("p"), steps=6, resume="latest")
    assert path.read_bytes() == whole
    assert [*(tmp_path / "one" / "checkpoints").glob(".corrupt-00000004-*")]
    assert "its SHA-256 is another than when it was uploaded" in capfd.readouterr().err
    assert first.watch.ends == ["done"]


@pytest.mark.full
@pytest.mark.parametrize("damage", ["truncated", "deleted", "flipped", "marker cut"])
def test_a_damaged_checkpoint_in_the_store_is_passed_over(server, tmp_path, capfd, damage):
    """The one before it is taken, and the damaged one is named."""
    fit(tmp_path / "one", server.url("p"), steps=4, every=4)
    fit(tmp_path / "one", server.url("p"), steps=6, every=6, resume="auto")
    assert steps_in(server, "p") == ([4, 6], [])
    shutil.rmtree(tmp_path / "one")
    key = next(key for key in server.names() if "step-00000006-" in key and key.endswith("safetensors"))
    if damage == "marker cut":
        key = next(key for key in server.names() if "step-00000006-" in key and key.endswith("COMPLETE.json"))
    data = server.client.get_object(Bucket=server.bucket, Key=key)["Body"].read()
    if damage == "deleted":
        server.client.delete_object(Bucket=server.bucket, Key=key)
    elif damage == "flipped":
        flipped = data[:-1] + bytes([data[-1] ^ 1])
        server.client.put_object(Bucket=server.bucket, Key=key, Body=flipped)
    else:
        server.client.put_object(Bucket=server.bucket, Key=key, Body=data[: len(data) // 2])
    ran = fit(tmp_path / "one", server.url("p"), steps=6, resume="latest")
    assert [*ran.losses] == [5, 6]
    assert "step-00000006-" in capfd.readouterr().err


@pytest.mark.full
def test_nothing_begins_anew_in_the_place_of_damaged_ones(server, tmp_path):
    fit(tmp_path / "one", server.url("p"), steps=2)
    shutil.rmtree(tmp_path / "one")
    key = next(key for key in server.names() if key.endswith("safetensors"))
    server.client.delete_object(Bucket=server.bucket, Key=key)
    for which in ("latest", "auto"):
        with pytest.raises(CheckpointError, match="could be fetched whole"):
            fit(tmp_path / which, server.url("p"), resume=which)


@pytest.mark.full
def test_both_tiers_keep_what_they_are_to_keep(server, tmp_path):
    """The disk 99, the store 2; nothing else is left in either, nor in parts."""
    more = "keep = 2"
    ran = fit(tmp_path / "one", server.url("p"), every=1, steps=8, more=more)
    assert steps_in(server, "p")[1] == []
    complete = steps_in(server, "p")[0]
    assert len(complete) == 2
    assert complete[-1] == 8
    there = sorted(path.name for path in (ran.folder / "checkpoints").iterdir())
    assert there == [f"step-{step:08d}.safetensors" for step in range(1, 9)]
    assert server.parts_left() == []


@pytest.mark.full
def test_an_upload_outlives_the_retention_of_the_disk(server, tmp_path):
    """A slow store gets a checkpoint whole that the disk has deleted meanwhile."""
    uploaded = []

    def slow():
        server.delay = 0.2
        uploaded.append(ran.flight.staged)

    def wait():
        while ran.flight is not None and ran.flight.staged is uploaded[0]:
            ran.advance()
        server.delay = 0.0

    with looking_at_uploads() as ran:
        fit(tmp_path / "one", server.url("p"), every=1, keep_here=1, steps=6, after={2: slow, 5: wait})
    (gone,) = uploaded
    assert not gone.path.exists()
    assert gone.step in steps_in(server, "p")[0]


@pytest.mark.full
def test_a_rollback_takes_later_checkpoints_out_of_the_listing(server, tmp_path):
    """A run that is restarted without its folder must not resume from what it had gone back from."""
    listed = []

    def go_back():
        end(ran)
        listed.append(steps_in(server, "p")[0])
        return Rollback(3, "for the test") if len(listed) == 1 else None

    def look():
        if listed:
            with ran.prefix._lock:  # as its thread does, a moment later at most
                ran.prefix._tend()
            listed.append(steps_in(server, "p")[0])

    with looking_at_uploads() as ran:
        fit(tmp_path / "one", server.url("p"), steps=8, after={5: go_back, 3: look})
    assert listed[0] == [2, 4]
    assert listed[1] == [2]
    assert steps_in(server, "p")[0][-1] == 8
    assert steps_in(server, "p")[1] == []  # what was left goes when the run has come as far again


@pytest.mark.full
def test_a_branch_that_was_left_while_the_store_was_down_is_not_fetched_again(server, tmp_path):
    """The run went back to step 2, its store did not answer, and it was killed."""
    from nanotrain_object_store.abandoned_branch import LEFT_AFTER, LeftBranch

    ran = fit(tmp_path / "one", server.url("p"), steps=4)
    (later,) = (ran.folder / "checkpoints").glob("step-00000004*")
    later.unlink()
    LeftBranch(ran.folder).note(2)
    again = fit(tmp_path / "one", server.url("p"), steps=5, resume="auto")
    assert [*again.losses] == [3, 4, 5]
    assert not (ran.folder / LEFT_AFTER).exists()


@pytest.mark.full
def test_a_run_that_comes_from_elsewhere_leaves_what_its_prefix_had(server, tmp_path):
    other = fit(tmp_path / "other", server.url("q"), steps=3, every=3)
    fit(tmp_path / "one", server.url("p"), steps=2)
    (path,) = (other.folder / "checkpoints").glob("step-00000003*")
    fit(tmp_path / "one", server.url("p"), steps=4, every=4, resume=str(path))
    assert steps_in(server, "p")[0] == [3, 4] or steps_in(server, "p")[0] == [4]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "other"}, "is the prefix of run 'small', process"),
        pytest.param({}, "add --resume", marks=pytest.mark.full),
    ],
)
def test_a_second_run_in_a_prefix_is_refused_by_name(server, tmp_path, change, said):
    fit(tmp_path / "one", server.url("p"), steps=2)
    before = server.names()
    with pytest.raises(NanotrainError, match=said):
        fit(tmp_path / "two", server.url("p"), **change)
    assert server.names() == before


@pytest.mark.full
def test_a_run_that_lives_keeps_its_prefix(server, tmp_path):
    from nanotrain_object_store.owner import Owner
    from nanotrain_object_store.prefix import Prefix
    from nanotrain_object_store.store import Store

    prefix = Prefix(
        Store(server.url("p")), Owner(run="small", id="x", host="elsewhere", pid=7), keep=3, lease=1.0
    )
    prefix.claim()
    prefix.begin()
    try:
        with pytest.raises(
            NanotrainError, match=r"in use by another run: run 'small', process 7 on elsewhere"
        ) as e:
            fit(tmp_path / "one", server.url("p"), resume="auto")
        assert e.value.exit_code == 4
    finally:
        prefix.end(5.0)
    assert fit(tmp_path / "one", server.url("p"), resume="auto", steps=2).watch.ends == ["done"]


@pytest.mark.full
def test_a_run_whose_host_is_gone_loses_its_prefix_after_the_lease(server, tmp_path):
    from nanotrain_object_store.owner import Owner, take
    from nanotrain_object_store.store import Store

    take(Store(server.url("p")), Owner(run="small", id="x", host="elsewhere", pid=7), lease=1.0)
    assert fit(tmp_path / "one", server.url("p"), resume="auto", steps=2).watch.ends == ["done"]
