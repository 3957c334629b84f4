"""Four ranks of the capstone recipe with an S3 server: who uploads what, and resumes from the store alone."""

import os
import shutil
import signal
import time

import pytest
from command import finish, nanotrain, start
from small_runs import steps_in

pytestmark = pytest.mark.full


def words(server, prefix, folder, *more, ranks=4, steps=12, every=4):
    monitors = f'[{{use="object_store", url="{server.url(prefix)}", lease=1.0}}, {{use="jsonl"}}]'
    changes = (
        f"monitor={monitors}",
        f"run.steps={steps}",
        "evaluation.every=0",
        f"checkpoint.every={every}",
        "run.deterministic=true",
        "run.log_every=1",
    )
    sets = [word for change in changes for word in ("--set", change)]
    return ["run", "capstone", "--nproc", str(ranks), "--folder", str(folder), *sets, *more]


def files(folder, step):
    return {p.name: p.read_bytes() for p in (folder / "checkpoints" / f"step-{step:08d}").iterdir()}


def assert_same_files(one, other):
    """Compare all that was saved last, but for the manifest, which has the prefix in its recipe."""
    found, wanted = (files(folder, 12) for folder in (one, other))
    assert found.keys() == wanted.keys()
    for name in wanted.keys() - {"MANIFEST.json"}:
        assert found[name] == wanted[name], name


def test_every_rank_uploads_what_it_wrote(server, tmp_path):
    ended = nanotrain(*words(server, "p", tmp_path / "run", steps=4), cwd=tmp_path)
    assert ended.code == 0, ended.err
    (entry,) = {key.split("/")[1] for key in server.names() if "step-00000004-" in key}
    for name, data in files(tmp_path / "run", 4).items():
        key = f"p/{entry}/step-00000004/{name}"
        assert server.client.get_object(Bucket=server.bucket, Key=key)["Body"].read() == data
    assert sum(name.startswith("rank-") for name in files(tmp_path / "run", 4)) == 4


def test_killed_ranks_are_replaced_on_a_machine_without_the_folder(server, tmp_path):
    """Bitwise the run that nothing happened to, from the store alone."""
    through = nanotrain(*words(server, "through", tmp_path / "through"), cwd=tmp_path)
    assert through.code == 0, through.err
    running = start(*words(server, "p", tmp_path / "run"), cwd=tmp_path)
    limit = time.monotonic() + 60
    while not steps_in(server, "p")[0] and time.monotonic() < limit:
        time.sleep(0.05)
    os.kill(running.pid, signal.SIGKILL)
    finish(running)
    time.sleep(2.0)  # its ranks see that it is gone
    assert steps_in(server, "p")[0]
    shutil.rmtree(tmp_path / "run")
    again = nanotrain(*words(server, "p", tmp_path / "run", "--resume", "auto"), cwd=tmp_path)
    assert again.code == 0, again.err
    assert "fetched" in again.err
    assert_same_files(tmp_path / "run", tmp_path / "through")


def test_another_layout_resumes_from_the_store_alone(server, tmp_path):
    """As it does from the disk: the same bits."""
    first = nanotrain(*words(server, "p", tmp_path / "run", steps=8), cwd=tmp_path)
    assert first.code == 0, first.err
    shutil.copytree(tmp_path / "run", tmp_path / "disk")
    shutil.rmtree(tmp_path / "run")
    remote = nanotrain(*words(server, "p", tmp_path / "run", "--resume", "auto", ranks=2), cwd=tmp_path)
    assert remote.code == 0, remote.err
    disk = nanotrain(*words(server, "q", tmp_path / "disk", "--resume", "auto", ranks=2), cwd=tmp_path)
    assert disk.code == 0, disk.err
    assert "fetched" in remote.err
    assert "fetched" not in disk.err
    assert_same_files(tmp_path / "run", tmp_path / "disk")


SLOW = """
import time
from nanotrain_core import hookimpl
from nanotrain_core.component import Component
from nanotrain_object_store import ObjectStoreConfig
from nanotrain_object_store.store import Store

get = Store.get

def slow(store, name, path, *alive):
    for _ in range(9):
        time.sleep(0.5)
        for say in alive:
            say()
    get(store, name, path, *alive)

Store.get = slow

@hookimpl
def nanotrain_register_monitor(register):
    register(Component(name="slow", config=ObjectStoreConfig, factory="slow:slow", summary="slow"))
"""


def test_a_fetch_that_takes_longer_than_a_hang_ends(server, tmp_path):
    """It was killed after five times run.hang_timeout, and again in every restart."""
    first = nanotrain(*words(server, "p", tmp_path / "run", ranks=2, steps=4), cwd=tmp_path)
    assert first.code == 0, first.err
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "slow.py").write_text(SLOW)
    more = ("--resume", "auto", "--plugin", "slow.py", "--set", "run.hang_timeout=1.6")
    ended = nanotrain(*words(server, "p", tmp_path / "run", *more, ranks=2, steps=6), cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert "fetched" in ended.err
