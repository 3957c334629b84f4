"""Which moment is gone back to, and from whose copies."""

import json
from pathlib import Path

from nanotrain_memory_snapshots import places, ring, space
from nanotrain_memory_snapshots.recovery import Held, plans
from nanotrain_memory_snapshots.seal import Moment


def held(of, step, where, rollbacks=0):
    return Held(of, Moment(rollbacks, step, "life"), f"host{where}", Path(f"/{where}"), f"{of}-{step}", 1, 1)


def newest(seen, at_least=0, bad=()):
    """Return rollbacks, step and readers of the first plan; None without one."""
    plan = next(plans(seen, at_least, set(bad)), None)
    return plan and (plan.moment.rollbacks, plan.moment.step, [reader for reader, _ in plan.sources])


#: Two ranks on two hosts, each with its own snapshots of steps 4 and 5, and the other's.
BOTH = [[held(of, step, where) for of in (0, 1) for step in (4, 5)] for where in (0, 1)]


def test_each_reads_its_own_of_the_newest():
    assert newest(BOTH) == (0, 5, [0, 1])


def test_its_own_comes_before_a_copy_on_the_same_host():
    moment = Moment(0, 5, "life")
    own, copy = (Held(0, moment, "host", Path("/", name), f"{name}-0", 1, 1) for name in ("own", "other"))
    for seen in ([copy, own], [own, copy]):
        assert next(plans([seen], 0, set())).sources == [(0, own)]
    assert next(plans([[copy, own]], 0, {own.place})).sources == [(0, copy)]


def test_a_step_that_one_rank_has_not_finished_is_none():
    seen = [BOTH[0], [each for each in BOTH[1] if each.moment.step == 4]]
    assert newest(seen) == (0, 5, [0, 0])  # its neighbor has it
    assert newest([[h for h in each if (h.of, h.moment.step) != (1, 5)] for each in BOTH]) == (0, 4, [0, 1])


def test_a_host_that_lost_its_memory_gets_what_its_neighbor_has():
    assert newest([BOTH[0], []]) == (0, 5, [0, 0])
    assert newest([[], []]) is None


def test_ranks_that_have_changed_hosts_read_what_is_there():
    """Rank 0 now runs where rank 1 was: without copies each host has the other's."""
    seen = [[held(1, 5, 0)], [held(0, 5, 1)]]
    assert newest(seen) == (0, 5, [1, 0])


def test_what_is_damaged_is_taken_from_the_neighbor_and_then_from_the_step_before():
    bad = {BOTH[1][3].place}
    assert newest(BOTH, bad=bad) == (0, 5, [0, 0])
    assert newest(BOTH, bad=bad | {BOTH[0][3].place}) == (0, 4, [0, 1])


def test_nothing_is_older_than_the_newest_checkpoint():
    assert newest(BOTH, at_least=5) == (0, 5, [0, 1])
    assert newest(BOTH, at_least=6) is None


def test_the_branch_that_a_rollback_left_is_older():
    seen = [[*BOTH[0], held(0, 3, 0, rollbacks=1)], [*BOTH[1], held(1, 3, 1, rollbacks=1)]]
    assert newest(seen) == (1, 3, [0, 1])
    assert newest([seen[0], BOTH[1]]) == (0, 5, [0, 1])  # not all have come so far


def test_snapshots_of_one_step_by_different_processes_are_not_mixed():
    other = Held(1, Moment(0, 6, "other"), "host1", Path("/1"), "x", 1, 1)
    assert newest([[*BOTH[0], held(0, 6, 0)], [*BOTH[1], other]]) == (0, 5, [0, 1])


def test_a_neighbor_is_on_another_host_where_there_are_several():
    assert ring.distance(["a"] * 4) == 1
    assert ring.distance(["a", "a", "b", "b"]) == 2
    assert ring.distance(["a", "a", "b", "b", "c", "c"]) == 2
    assert ring.distance(["a", "b", "a", "b"]) == 1
    assert ring.distance(["a", "a", "a", "b"]) == 1  # not all can have one


def test_another_runs_snapshots_are_not_seen(tmp_path):
    mine, others = places.new_identity({"the recipe": "x"}), places.new_identity({"the recipe": "x"})
    for identity in (mine, others):
        places.make_folder(places.folder_of(2, identity, str(tmp_path)))
    assert [rank for rank, _ in places.folders_here(mine, str(tmp_path))] == [2]
    places.forget(mine, str(tmp_path))
    assert [*places.folders_here(mine, str(tmp_path))] == []
    assert [rank for rank, _ in places.folders_here(others, str(tmp_path))] == [2]


def test_an_identity_says_what_has_changed(tmp_path):
    places.write_identity(tmp_path, places.new_identity({"the recipe": "x", "the code of a": "1"}))
    found = places.read_identity(tmp_path)
    assert found.differences({"the recipe": "y", "the code of b": "1"}) == [
        "the code of a",
        "the code of b",
        "the recipe",
    ]
    for odd in ("", "[]", json.dumps({"name": "../../x", "of": {}}), json.dumps({"name": 3, "of": {}})):
        (tmp_path / places.FILE).write_text(odd)
        assert places.read_identity(tmp_path) is None


def test_memory_that_the_host_cannot_spare_is_not_taken(tmp_path):
    proc, group = tmp_path / "proc", tmp_path / "sys" / "fs" / "cgroup"
    (proc / "self").mkdir(parents=True)
    group.mkdir(parents=True)
    (proc / "self" / "mounts").write_text(f"none / ext4 rw 0 0\nnone {tmp_path} tmpfs rw 0 0\n")
    (proc / "meminfo").write_text("MemTotal: 1000000 kB\nMemAvailable: 150000 kB\n")
    assert space.missing(tmp_path, 99_000_000, tmp_path) == ""
    assert space.missing(tmp_path, 110_000_000, tmp_path) == "0.10 GB of memory can be spared"
    (proc / "self" / "cgroup").write_text("0::/job/step\n")
    for name, limit in (("job", "100000000"), ("job/step", "max")):
        (group / name).mkdir()
        (group / name / "memory.max").write_text(f"{limit}\n")
        (group / name / "memory.current").write_text("45000000\n")
        (group / name / "memory.stat").write_text("anon 45000000\ninactive_file 0\n")
    assert space.missing(tmp_path, 40_000_000, tmp_path) == ""
    assert space.missing(tmp_path, 60_000_000, tmp_path) == "0.05 GB of memory can be spared"
    (group / "job" / "memory.stat").write_text("inactive_file 20000000\n")  # given back where needed
    assert space.missing(tmp_path, 60_000_000, tmp_path) == ""
    (proc / "self" / "cgroup").write_text("4:cpu:/a\n3:memory:/docker/b\n")
    (group / "memory").mkdir()
    for name, number in (("limit_in_bytes", 80_000_000), ("usage_in_bytes", 45_000_000)):
        (group / "memory" / f"memory.{name}").write_text(f"{number}\n")
    (group / "memory" / "memory.stat").write_text("total_inactive_file 0\n")
    assert space.missing(tmp_path, 60_000_000, tmp_path) == "0.03 GB of memory can be spared"
    (group / "memory" / "memory.limit_in_bytes").write_text("45000000\n")
    assert space.missing(tmp_path, 1, tmp_path) == "0.00 GB of memory can be spared"
    assert space.missing(tmp_path, 0, tmp_path) == ""  # a restart refused here would end the run
    (proc / "self" / "cgroup").write_text("0::/\n")
    assert space.missing(tmp_path, 60_000_000, tmp_path) == ""
    (proc / "self" / "mounts").write_text("none / ext4 rw 0 0\n")  # a disk has its own limit
    assert space.missing(tmp_path, 110_000_000, tmp_path) == ""
    assert "GB are free in" in space.missing(tmp_path, 10**18, tmp_path)
