"""A store that is down, slow, or fails in the middle: training goes on, and half a checkpoint is none."""

import time
from itertools import count
from threading import Thread

import pytest
from nanotrain_object_store import before_restore, flight
from nanotrain_object_store.catalogue import look, missing, read_markers
from nanotrain_object_store.fetch import fetch
from nanotrain_object_store.monitor import NotUploaded
from nanotrain_object_store.store import Store
from small_runs import end, fit, looking_at_uploads, steps_in

from nanotrain_core.errors import CheckpointError

DOWN, UP = "the object store takes no uploads", "the object store takes uploads again"


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(flight, "LAST", 0.5)
    monkeypatch.setattr(before_restore, "PATIENCE", 1.0)


def until(condition, seconds=30.0):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not come to be"
        time.sleep(0.02)


def assert_whole(server, prefix, scratch):
    """Download all that is listed."""
    store = Store(server.url(prefix))
    listing = look(store)
    found = read_markers(store, listing, pytest.fail)
    for stored in found:
        assert missing(stored, listing.objects[stored.entry]) == []
        assert fetch(store, stored, stored.files, scratch / stored.entry) == ""
    return [stored.step for stored in found]


@pytest.mark.parametrize("how", ["killed", pytest.param("503", marks=pytest.mark.full)])
def test_training_goes_on_while_the_store_is_down(server, tmp_path, capfd, how):
    """It is told once that it went away and once that it is back; the last checkpoint is there."""
    undisturbed = fit(tmp_path / "undisturbed", server.url("undisturbed"), steps=30)
    capfd.readouterr()

    def go_away():
        end(ran)
        if how == "killed":
            server.kill()
        else:
            server.fail = lambda method, path: method in ("PUT", "POST")

    def come_back():
        if how == "killed":
            server.start()
        server.fail = lambda method, path: False

    def waits():
        until(lambda: ran.flight.trouble)

    def gives_way():
        """What was on its way when the store went away makes room for a newer one."""
        assert ran.flight.staged.step > 6 or ran.flight.cancelled.is_set()
        waits()

    with looking_at_uploads() as ran:
        after = {5: go_away, 8: waits, 14: gives_way, 20: come_back}
        run = fit(tmp_path / "one", server.url("p"), steps=30, after=after)
    said = capfd.readouterr().err
    assert run.losses == undisturbed.losses
    assert (said.count(DOWN), said.count(UP)) == (1, 1)
    assert server.url("p") in said
    assert assert_whole(server, "p", tmp_path / "back")[0] == 30
    assert steps_in(server, "p")[1] == []
    ages = dict(run.watch.metrics["checkpoint/upload_age"])
    assert ages[14] > ages[6]


@pytest.mark.full
def test_training_does_not_wait_for_a_slow_store(server, tmp_path):
    """While a request takes a second, steps take what they always do; of what waits the newest is sent."""
    steps = {}

    def slow(at):
        steps[at] = time.monotonic()
        server.delay = 1.0 if at < 40 else 0.0

    with looking_at_uploads() as ran:
        run = fit(
            tmp_path / "one",
            server.url("p"),
            steps=42,
            after={at: (lambda at=at: slow(at)) for at in (3, 40)},
        )
    assert ran.left_out >= 10
    assert steps[40] - steps[3] < 5.0  # 19 saves in it, each of which takes 4 requests
    assert assert_whole(server, "p", tmp_path / "back")[0] == 42
    assert run.watch.ends == ["done"]


@pytest.mark.full
def test_a_server_that_dies_in_an_upload_leaves_no_half_checkpoint(server, tmp_path):
    """Killed at each request of an upload in turn, and brought back a moment later."""
    for number in range(1, 9):
        prefix, numbers = f"p{number}", count(1)

        def dies(method, path, prefix=prefix, numbers=numbers, number=number):
            if f"{prefix}/" in path and method in ("PUT", "POST", "DELETE") and next(numbers) == number + 2:
                Thread(target=server.kill).start()
                return True
            return False

        def back(prefix=prefix):
            until(lambda: not server.is_up)
            server.fail = lambda method, path: False
            server.start()
            complete = assert_whole(server, prefix, tmp_path / prefix / "then")
            assert set(complete) <= {2, 4}

        server.fail = dies
        fit(tmp_path / prefix / "run", server.url(prefix), use="sharded_v2", steps=8, after={5: back})
        assert assert_whole(server, prefix, tmp_path / prefix / "back")[0] == 8
        assert steps_in(server, prefix)[1] == []


@pytest.mark.full
def test_a_last_checkpoint_that_is_not_in_the_store_is_told(server, tmp_path):
    """With the exit code of one that was not saved; when the run is started again, it is uploaded."""
    more = "wait_at_end = 1.0"
    with pytest.raises(NotUploaded, match=r"the last checkpoint, of step 6, is not in s3://.* alone") as told:
        fit(tmp_path / "one", server.url("p"), more=more, after={5: server.kill})
    assert told.value.exit_code == 7
    server.start()
    assert 6 not in steps_in(server, "p")[0]
    fit(tmp_path / "one", server.url("p"), resume="auto")
    assert 6 in steps_in(server, "p")[0]


@pytest.mark.full
def test_a_run_that_finds_no_store_begins_where_that_loses_nothing(server, tmp_path, capfd):
    """Anew, or from the disk; not where checkpoints may be in the store that nobody can see."""
    server.kill()
    with pytest.raises(CheckpointError, match="does not answer"):
        fit(tmp_path / "one", server.url("p"), resume="auto")
    fit(tmp_path / "one", server.url("p"), steps=4, after={1: server.start})
    assert "the run begins without it" in capfd.readouterr().err
    assert steps_in(server, "p")[0][-1] == 4
    server.kill()
    run = fit(tmp_path / "one", server.url("p"), steps=6, resume="auto", after={5: server.start})
    assert [*run.losses] == [5, 6]
    assert steps_in(server, "p")[0][-1] == 6


@pytest.mark.full
def test_a_run_that_begins_anew_without_its_store_leaves_what_it_finds_there(server, tmp_path):
    """Checkpoints of an earlier run of the name: they are not mixed with those of this one."""
    fit(tmp_path / "one", server.url("p"), steps=2)
    there = server.names()
    server.kill()
    more = "wait_at_end = 5.0"
    with pytest.raises(NotUploaded, match=r"holds checkpoints of this run \(steps 2\), and it begins anew"):
        fit(tmp_path / "two", server.url("p"), more=more, after={1: server.start})
    assert [name for name in server.names() if "COMPLETE" in name] == [
        name for name in there if "COMPLETE" in name
    ]


@pytest.mark.full
def test_a_prefix_that_another_run_has_taken_meanwhile_is_left_alone(server, tmp_path, capfd):
    """As after a partition: who finds another's name there uploads nothing more, and says whose it is."""
    from nanotrain_object_store.owner import OWNER, Owner

    other = Owner(run="small", id="other", host="elsewhere", pid=7)

    def taken():
        end(ran)
        with ran.prefix._lock:  # no sign of life that is on its way overwrites it
            Store(server.url("p")).put_bytes(OWNER, other.text())

    more = "wait_at_end = 5.0"
    with looking_at_uploads() as ran, pytest.raises(NotUploaded, match="process 7 on elsewhere"):
        fit(tmp_path / "one", server.url("p"), more=more, after={3: taken})
    assert steps_in(server, "p")[0] == [2]
    assert Store(server.url("p")).read(OWNER, most=9999) == other.text()


@pytest.mark.full
def test_no_bucket_and_no_permission_are_told_before_a_step(server, tmp_path):
    with pytest.raises(Exception, match="is in no store") as told:
        fit(tmp_path / "one", "s3://no-such-bucket/p")
    assert told.value.exit_code == 2
