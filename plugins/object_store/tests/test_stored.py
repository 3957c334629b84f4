"""What a stranger writes into a prefix: names that lead elsewhere, markers that lie, entries of all kinds."""

import json
import os
import shutil
import subprocess
from hashlib import sha256
from types import SimpleNamespace

import pytest
from nanotrain_object_store import ObjectStoreConfig
from nanotrain_object_store.catalogue import Listing, expendable, look, read_markers
from nanotrain_object_store.fetch import fetch, put_in_place, share_of
from nanotrain_object_store.monitor import ObjectStore
from nanotrain_object_store.owner import (
    OWNER,
    OthersPrefix,
    Owner,
    Taken,
    expect_ours,
    process_start,
    read_owner,
    take,
)
from nanotrain_object_store.prefix import Prefix
from nanotrain_object_store.staged import stage
from nanotrain_object_store.store import Store
from nanotrain_object_store.stored import LEFT, MARKER, Sent, Stored, find_local, hashed, is_plain, parse

from nanotrain_core.api import CheckpointError, NanotrainError
from nanotrain_core.api.torch import CheckpointReport, EvaluationReport
from nanotrain_core.run.events import Events
from nanotrain_core.run.stop import StopRequest

ENTRY = "step-00000004-0123abcd"
FILES = {"a": Sent(3, sha256(b"abc").hexdigest())}
STORED = Stored(entry=ENTRY, step=4, run="r", name="step-00000004", folder=True, files=FILES)


@pytest.fixture
def store(tmp_path):
    return Store(f"file://{tmp_path}/store")


def sealed(**changes):
    """Return a marker that a forger has changed and sealed again."""
    table = json.loads(STORED.text())
    del table["sha256"]
    body = json.dumps({**table, **changes}, indent=0)[:-2]
    return f'{body},\n"sha256": "{sha256(body.encode()).hexdigest()}"\n}}\n'.encode()


def test_a_marker_comes_back_as_it_was_written():
    assert parse(STORED.text(), ENTRY) == STORED


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "a/../b", "", ".hidden", "a/b/c/d/e", "a\0b", "a b", "-x", "a//b", "a/", "é"],
)
def test_names_that_lead_elsewhere_are_refused(name):
    assert not is_plain(name)
    with pytest.raises(CheckpointError, match="plain names"):
        parse(sealed(files={name: {"bytes": 3, "sha256": FILES["a"].sha256}}), ENTRY)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step": 5}, "expected 4"),
        ({"step": True}, "step True"),
        ({"version": 2}, "version 2"),
        ({"format": "x"}, "format 'x'"),
        ({"name": "../../x"}, "with or without a suffix"),
        ({"name": "step-00000005"}, "with or without a suffix"),
        ({"name": "latest"}, "with or without a suffix"),
        ({"name": None}, "with or without a suffix"),
        ({"files": {}}, "no files"),
        ({"files": []}, "no files"),
        ({"files": {"a": {"bytes": -1, "sha256": FILES["a"].sha256}}}, "bytes and SHA-256"),
        ({"files": {"a": {"bytes": 3.0, "sha256": FILES["a"].sha256}}}, "bytes and SHA-256"),
        ({"files": {"a": {"bytes": 3, "sha256": "x"}}}, "bytes and SHA-256"),
        ({"files": {"a": 3}}, "bytes and SHA-256"),
        ({"folder": 1}, "true or false"),
        ({"folder": False}, "expected files to name step-00000004 alone"),
        ({"run": None}, "expected a text"),
    ],
)
def test_markers_that_lie_are_refused_by_name(changes, said):
    with pytest.raises(CheckpointError, match=rf"{ENTRY}/{MARKER} is no marker .*{said}"):
        parse(sealed(**changes), ENTRY)


TEXT = STORED.text()


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"\xff\xfe", b"[" * 5000, TEXT[:-1], TEXT[:-5], TEXT.replace(b'"step": 4', b'"step": 5')],
)
def test_what_is_no_marker_is_refused(data):
    """Empty, nested, cut short, changed."""
    with pytest.raises(CheckpointError, match="is no marker"):
        parse(data, ENTRY)


def test_strange_objects_are_left_alone(store):
    strange = ("notes.txt", "step-1/x", "step-00000004/x", f"x/{ENTRY}/{MARKER}", f"{ENTRY}-copy/{MARKER}")
    for name in strange:
        store.put_bytes(name, b"x")
    store.put_bytes(f"{ENTRY}/{MARKER}", b"x")
    listing = look(store)
    assert [*listing.objects] == [ENTRY]
    told = []
    assert read_markers(store, listing, told.append) == []
    assert ENTRY in told[0]
    assert {*strange} <= {*store.sizes()}


def test_a_fetch_writes_only_into_its_folder(store, tmp_path):
    store.put_bytes(STORED.key("a"), b"abc")
    assert fetch(store, STORED, ["a"], tmp_path / "scratch") == ""
    (tmp_path / "to").mkdir()
    path = put_in_place(STORED, tmp_path / "scratch", tmp_path / "to")
    assert path == tmp_path / "to" / "step-00000004"
    assert (path / "a").read_bytes() == b"abc"
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "a").write_bytes(b"abc")
    with pytest.raises(FileExistsError):
        put_in_place(STORED, tmp_path / "again", tmp_path / "to")


def test_links_on_the_disk_are_no_checkpoint(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "step-00000004").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "step-00000004 (copy)").mkdir()
    assert find_local(tmp_path, 4) is None
    (tmp_path / "step-00000004.one").write_bytes(b"")
    assert find_local(tmp_path, 4) == tmp_path / "step-00000004.one"


def test_files_are_divided_evenly_and_each_once():
    sizes = {f"f{n}": Sent(10 + n % 3, "0" * 64) for n in range(40)}
    stored = Stored(entry=ENTRY, step=4, run="r", name="step-00000004", folder=True, files=sizes)
    shares = [share_of(stored, rank, 4) for rank in range(4)]
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    loads = [sum(sizes[name].bytes for name in share) for share in shares]
    assert max(loads) - min(loads) <= 12


def listing(*entries, left=(), half=()):
    """Return a listing: complete, left by a rollback, and broken off."""
    of = {entry: {f"{entry}/{MARKER}": 1} for entry in entries}
    of |= {entry: {f"{entry}/{LEFT}": 1} for entry in left}
    return Listing(of | {entry: {f"{entry}/x/y": 1} for entry in half})


def entry(step, number=0):
    return f"step-{step:08d}-{number:08x}"


@pytest.mark.parametrize(
    ("there", "options", "gone"),
    [
        (listing(*map(entry, (1, 2, 3, 4))), {"keep": 2}, {entry(1), entry(2)}),
        (listing(*map(entry, (1, 2, 3, 4))), {"keep": 1, "evaluated": 3}, {entry(1), entry(2)}),
        (listing(*map(entry, (1, 2, 4))), {"keep": 1, "evaluated": 3}, {entry(1)}),
        (listing(*map(entry, (1, 2, 3, 4))), {"keep": 1, "evaluated": 3, "trusted": 1}, {entry(2)}),
        (listing(entry(4), entry(4, 7)), {"keep": 3}, {entry(4, 7)}),
        (listing(entry(4), half=[entry(2), entry(5)]), {"keep": 3}, {entry(2), entry(5)}),
        (listing(entry(4), left=[entry(4, 7), entry(6)]), {"keep": 3}, {entry(4, 7)}),
        (listing(*map(entry, (2, 4, 6))), {"keep": 9}, set()),
    ],
)
def test_retention_deletes_what_it_should_and_no_more(there, options, gone):
    """Beside the newest, of step 4."""
    keep = options.pop("keep")
    assert {*expendable(there, newest=entry(4), keep=keep, retention=options)} == gone


def test_the_marker_is_deleted_first(store):
    from nanotrain_object_store.catalogue import remove

    for name in ("x/1", "x/2", MARKER):
        store.put_bytes(f"{ENTRY}/{name}", b"x")
    order, delete = [], store.delete
    store.delete = lambda names: (order.append([*names]), delete(names))
    assert remove(store, look(store), [ENTRY]) == ""
    assert order[0] == [f"{ENTRY}/{MARKER}"]
    assert store.sizes() == {}


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b'{"run": 1}', b"[" * 5000])
def test_an_owner_that_is_none_is_refused(store, data):
    store.put_bytes(OWNER, data)
    with pytest.raises(OthersPrefix, match="does not say which run"):
        read_owner(store)


def test_an_owner_that_renews_is_waited_for_and_one_that_does_not_is_replaced(store):
    import attrs

    live = Owner(run="r", id="one", host="elsewhere", pid=1)
    take(store, live, lease=0.0)
    ours = Owner(run="r", id="two")

    def renews(seconds):
        store.put_bytes(OWNER, attrs.evolve(live, beat=1).text())

    with pytest.raises(Taken, match="run 'r', process 1 on elsewhere"):
        take(store, ours, lease=60.0, sleep=renews)
    assert read_owner(store).id == "one"
    take(store, ours, lease=0.01)
    assert read_owner(store).id == "two"
    with pytest.raises(OthersPrefix, match="is the prefix of run 'r'"):
        take(store, Owner(run="s", id="three"), lease=0.01)


def test_a_copied_run_folder_does_not_take_the_prefix_of_a_live_run(store):
    """It has the same id: a process that beats keeps its prefix, on this host or another."""
    import attrs

    for changes in ({"host": "elsewhere", "pid": 1}, {"pid": os.getppid()}, {"start": "earlier"}):
        live = Owner(run="r", id="copied", **changes)
        live = attrs.evolve(live, began=process_start(live.pid))
        store.put_bytes(OWNER, live.text())

        def renews(seconds, live=live):
            store.put_bytes(OWNER, attrs.evolve(live, beat=1).text())

        with pytest.raises(Taken):
            take(store, Owner(run="r", id="copied"), lease=60.0, sleep=renews)
        with pytest.raises(Taken, match=f"process {live.pid} on {live.host}"):
            expect_ours(store, Owner(run="r", id="copied"))


def test_a_restart_in_the_run_folder_waits_for_no_process_that_is_gone(store):
    """Also where its id has been reused, or nobody has waited for it."""
    namespace = process_start(os.getpid()).split()[0]
    with subprocess.Popen(["true"]) as gone:
        os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
        for pid, ticks in ((gone.pid, "1"), (os.getppid(), "1"), (2**30, "1")):
            store.put_bytes(OWNER, Owner(run="r", id="i", pid=pid, began=f"{namespace} {ticks}").text())
            own = Owner(run="r", id="i")
            take(store, own, lease=60.0, sleep=pytest.fail)
            take(store, own, lease=60.0, sleep=pytest.fail)  # as after a listing that failed
            assert read_owner(store) == own
    boot, _, initial = namespace.partition("/")
    # Of another container or another machine with this host name, and unknown.
    for began in (f"{boot}/pid:[1] 1", f"0123-4567/{initial} 1", f"{initial} 1", ""):
        assert not Owner(run="r", id="i", pid=2**30, began=began).is_gone()


def test_an_overwrite_that_is_seen_late_refuses_no_run(store, monkeypatch):
    """The owner before, which had ended, was taken for another run that is alive."""
    before = Owner(run="r", id="one", host="elsewhere", pid=1, ended=True)
    store.put_bytes(OWNER, before.text())
    monkeypatch.setattr(store, "read", lambda name, most: before.text())
    prefix = Prefix(store, Owner(run="r", id="one"), keep=3, lease=1.0)
    prefix.claim()
    prefix._tend()
    monkeypatch.undo()
    assert read_owner(store) == prefix.own
    another = Owner(run="r", id="one", host="elsewhere", pid=2, ended=True)
    store.put_bytes(OWNER, another.text())
    with pytest.raises(NanotrainError, match=r"is in use by another run: .* process 2 on elsewhere"):
        prefix._tend()


def test_text_of_a_stranger_is_printed_without_control_characters(store):
    store.put_bytes(OWNER, Owner(run="\x1b[2Jx" + "y" * 9999, id="i").text())
    found = str(read_owner(store))
    assert "\x1b" not in found
    assert len(found) < 400


def test_hashes_are_those_of_the_file(tmp_path):
    (tmp_path / "x").write_bytes(b"abc" * 3_000_000)
    assert hashed(tmp_path / "x") == Sent(9_000_000, sha256(b"abc" * 3_000_000).hexdigest())


def test_no_marker_is_written_where_a_file_is_missing_or_short(store):
    prefix = Prefix(store, Owner(run="r", id="x"), keep=3, lease=1.0)
    prefix.claim()
    for data, said in ((None, "is not in the store"), (b"ab", "has 2 bytes, expected 3"), (b"abc", "")):
        if data is not None:
            store.put_bytes(STORED.key("a"), data)
        problem = prefix.publish(STORED, lambda: False)
        assert said in problem
        assert (problem == "") == (said == "") == (f"{ENTRY}/{MARKER}" in store.sizes())


def test_a_checkpoint_that_the_run_went_back_before_is_not_completed(store):
    prefix = Prefix(store, Owner(run="r", id="x"), keep=3, lease=1.0)
    prefix.claim()
    store.put_bytes(STORED.key("a"), b"abc")
    assert "gone back" in prefix.publish(STORED, lambda: True)
    assert f"{ENTRY}/{MARKER}" not in store.sizes()


def test_what_is_staged_can_be_read_when_retention_has_deleted_it(tmp_path):
    path = tmp_path / "step-00000004"
    path.mkdir()
    (path / "a").write_bytes(b"abc")
    staged = stage(4, path, None, rank=0)
    shutil.rmtree(path)
    assert staged.files["a"].read_bytes() == b"abc"
    staged.remove()
    assert [*tmp_path.iterdir()] == []


def test_after_a_rollback_to_before_the_first_evaluation_none_counts():
    """Retention would keep the new branch's checkpoint of that step, and delete the older, good one."""
    monitor = ObjectStore(ObjectStoreConfig(url="memory://runs/mine"))
    events = Events([monitor], StopRequest())
    early = events.meta()
    events.evaluation(EvaluationReport(8, 3.5, None, 1))
    later = events.meta()
    events.load_meta(early)
    assert monitor.evaluated is None
    events.load_meta(later)
    assert monitor.evaluated == 8


def test_what_the_disk_keeps_is_kept_in_the_store(tmp_path):
    """After skipped steps, and before steps that the guard may roll back, which needs an older one."""
    monitor, staged = ObjectStore(ObjectStoreConfig(url="memory://runs/mine")), []
    monitor.uploads = SimpleNamespace(add=staged.append)
    monitor.run = SimpleNamespace(rank=0, mesh=SimpleNamespace(gather=lambda mine: [mine]))
    for more in ({"trusted": 1}, {"trusted": 1, "skipped": 2}):
        monitor.on_checkpoint(CheckpointReport(4, tmp_path, 0.0, **more))
    assert [each.retention for each in staged] == [{"evaluated": None, "trusted": 1}, None]
