"""Ranks that would run different things find out before they talk."""

import errno
import importlib
import os
import re
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import pytest
import torch.distributed as dist

from nanotrain_core.errors import LaunchError, NanotrainError
from nanotrain_core.launch import agreement, launcher, worker
from nanotrain_core.launch import code_digests as code
from nanotrain_core.launch.agreement import agree
from nanotrain_core.launch.attempts import LaunchHistory
from nanotrain_core.launch.code_digests import code_digests, environment_facts, expect_unchanged
from nanotrain_core.launch.environment import Ranks
from nanotrain_core.launch.hosts import Nodes
from nanotrain_core.launch.worker import Job, share_folder
from nanotrain_core.recipe import load_recipe
from nanotrain_core.registry.discovery import PluginInfo
from nanotrain_core.registry.registry import Registry
from nanotrain_core.run.folder import RunFolder

LR = "the recipe's optimizer.lr"
FACTS = {"nanotrain-core": "0.1.0", "nanotrain-ddp": "0.1.0", LR: "0.1"}


def outcomes(*facts):
    store = dist.HashStore()
    return on_ranks(len(facts), lambda rank: agree(store, rank, len(facts), facts[rank]))


def on_ranks(count, check):
    """Return what a check says on each rank: "equal", or the text of its error."""

    def ask(rank):
        try:
            check(rank)
        except NanotrainError as error:
            return str(error)
        return "equal"

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(ask, range(count)))


def test_equal_facts_pass_everywhere():
    assert outcomes(FACTS, FACTS, FACTS) == ["equal"] * 3


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({**FACTS, "nanotrain-ddp": "0.2.0"}, "nanotrain-ddp is 0.2.0 there and 0.1.0 on rank 0"),
        ({"nanotrain-core": "0.1.0", LR: "0.1"}, "nanotrain-ddp is missing there and 0.1.0"),
        ({**FACTS, LR: "0.5"}, f"{LR} is 0.5 there and 0.1 on rank 0"),
    ],
)
def test_every_rank_learns_who_differs_and_in_what(other, text):
    found = outcomes(FACTS, FACTS, other)
    assert len(set(found)) == 1
    assert found[0].startswith("rank 2 on ")
    assert text in found[0]


@pytest.mark.parametrize("fact", [LR, "--resume", "--folder"])
def test_two_runs_that_meet_by_mistake_are_told_how_to_part(monkeypatch, fact):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "small-0f04bafa")
    for text in outcomes({**FACTS, fact: "abc"}, {**FACTS, fact: "xyz"}):
        assert text.endswith("; two runs at one endpoint need two --rdzv-id, both have small-0f04bafa")


@pytest.mark.parametrize("entry", ["their_plugin", "their_plugin.hooks:plugin"])
def test_hosts_with_other_code_of_one_version_are_told_apart(tmp_path, monkeypatch, entry):
    """Two checkouts of different commits had trained together, and every check had said "equal"."""
    plugin = PluginInfo(name="theirs", distribution="their-plugin", version="1.0", module=entry)

    def facts(host, text, name="loss.py"):
        package = tmp_path / host / "their_plugin"
        (package / "__pycache__").mkdir(parents=True)
        (package / "__pycache__/loss.cpython-311.pyc").write_text(host)
        (package / "__init__.py").touch()
        (package / ".#loss.py").symlink_to("editor@host.4242")
        (package / name).write_text(text)
        (tmp_path / host / "another_plugin.py").write_text(host)
        with monkeypatch.context() as there:
            there.syspath_prepend(package.parent)
            there.setitem(sys.modules, "their_plugin", None)
            del sys.modules["their_plugin"]
            importlib.import_module("their_plugin")
            return environment_facts(Registry((plugin,)), ("nanotrain-core", "their-plugin"))

    first = facts("a", "scale = 1\n")
    assert {"Python", "numpy", "torch", "the code of nanotrain-core"} < first.keys()
    assert outcomes(first, facts("b", "scale = 1\n")) == ["equal"] * 2
    for other in (facts("c", "scale = 2\n"), facts("d", "scale = 1\n", "loss_.py")):
        found = outcomes(first, other)
        assert len(set(found)) == 1
        assert found[0].startswith("rank 1 on ")
        assert "does not run what rank 0 on" in found[0]
        assert "the code of their-plugin is " in found[0]


def test_code_is_read_by_one_rank_of_a_host_and_only_what_the_run_uses():
    """Every rank had read every plugin; an edit of one that the run does not use had refused the run."""
    registry, used = launcher.load_plugins(), ("nanotrain-core", "nanotrain-ddp", "torch")
    first = environment_facts(registry, used)
    read = {name for name, found in first.items() if name.startswith("the code of ") and found}
    assert read == {"the code of nanotrain-core", "the code of nanotrain-ddp"}
    second = environment_facts(registry, used, with_code=False)
    assert second["the code of nanotrain-core"] is None
    lacking = {**first, "tokenizers": None}  # which a run without text does not need
    assert outcomes(first, second, lacking) == ["equal"] * 3
    assert "numpy is 0.1 there" in outcomes(first, {**second, "numpy": "0.1"})[0]


def test_what_cannot_be_read_is_no_code(tmp_path, monkeypatch):
    """A module in an archive, or a folder called like one, had ended in a traceback."""
    package = tmp_path / "odd"
    (package / "folder.py").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    plugin = PluginInfo(name="odd", distribution="odd", version="1.0", module="odd")
    monkeypatch.setitem(sys.modules, "odd", types.SimpleNamespace(__file__=str(package / "__init__.py")))
    alone = code_digests(Registry((plugin,)), ("odd",))
    (package / "loop.py").symlink_to("loop.py")
    os.mkfifo(package / "pipe.py")
    code._digest.cache_clear()
    assert code_digests(Registry((plugin,)), ("odd",)) == alone
    archived = types.SimpleNamespace(__file__=str(package / "__init__.py" / "there" / "__init__.py"))
    monkeypatch.setitem(sys.modules, "odd", archived)
    assert code_digests(Registry((plugin,)), ("odd",)).keys() == {"odd"}


def test_ranks_that_would_run_other_code_than_their_launcher_found_are_refused(tmp_path, monkeypatch):
    """After `git pull` in its checkout, a restarted run had gone on with a mixture of two commits."""
    jobs = []
    monkeypatch.setattr(launcher, "_run_agent", lambda job, recipe, nodes: jobs.append(job) or 0)
    assert launcher.start_ranks(Job(recipe="laptop"), load_recipe("laptop.toml"), Nodes(nproc=4)) == 0
    assert {"nanotrain-core", "nanotrain-ddp"} <= jobs[0].code.keys()
    assert "nanotrain-doctor" not in jobs[0].code  # the run uses none of its components
    expect_unchanged(jobs[0].code, launcher.load_plugins())
    monkeypatch.chdir(tmp_path)
    edited = attrs.evolve(jobs[0], code={**jobs[0].code, "nanotrain-ddp": "of another commit"})
    text = "the code of nanotrain-ddp has changed since this launch: start it again with --resume auto"
    with pytest.raises(LaunchError, match=re.escape(text)) as caught:
        edited.run(Ranks())
    assert (caught.value.exit_code, caught.value.restart_helps) == (1, False)  # scripts start it again


@pytest.mark.parametrize(("folders", "seen"), [(("a", "a", "b"), False), (("a", "a", "a"), True)])
def test_hosts_that_do_not_see_the_folder_of_rank_0_are_refused(tmp_path, monkeypatch, folders, seen):
    """Each on a disk of its own: requeued with another host as rank 0, the run had begun anew."""
    monkeypatch.setattr(worker, "CACHED", 0.0)
    store, claims = dist.PrefixStore("attempt", dist.HashStore()), []
    recipe = load_recipe("laptop.toml", overrides=["run.timeout=60"])
    for folder in set(folders):  # which an earlier launch has used, with this host as rank 0
        RunFolder.claim("a", folder=tmp_path / folder).release()
    broadcast = worker.broadcast_from_rank_0

    def share(rank):
        ranks = Ranks(rank=rank, world_size=3, local_rank=int(rank == 1), local_world_size=2)
        job = Job(recipe="laptop", folder=str(tmp_path / folders[0]), resume="auto")
        claims.append(share_folder(job, ranks, recipe, store, LaunchHistory())[1])

    def on_its_disk(decide, key, ranks, store):
        got = broadcast(decide, key, ranks, store)
        return str(tmp_path / folders[ranks.rank]) if key == "folder" else got

    monkeypatch.setattr(worker, "broadcast_from_rank_0", on_its_disk)
    found = on_ranks(3, share)
    assert len(set(found)) == 1
    if seen:
        assert found[0] == "equal"
        next(filter(None, claims)).release()
    else:
        assert found[0].startswith(f"rank 2 does not find rank 0's run folder, {tmp_path}/a on ")
        assert f", as {tmp_path}/b on " in found[0]
        assert found[0].endswith(": all hosts need one shared folder, under the same path")


def test_a_lock_that_excludes_reading_is_that_of_a_folder_that_is_seen(tmp_path, monkeypatch):
    """As on SMB: rank 0 had ended in a traceback, while the others waited for it."""
    with monkeypatch.context() as shared:

        def refuse(self, encoding):
            raise PermissionError(errno.EACCES, "Permission denied")

        shared.setattr(Path, "read_text", refuse)
        claim = RunFolder.claim("a", folder=tmp_path / "a")
        owner = claim.owner()
        assert agreement._sees(tmp_path / "a" / ".lock", owner, 0.0)
    assert claim.owner() == owner
    claim.release()
