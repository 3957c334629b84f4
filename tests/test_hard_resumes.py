"""Saving and going on where it is hard: ranks without state, slow disks, rollbacks, clocks that differ."""

import json
import random
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from unittest import mock

import attrs
import pytest
import torch
from nanotrain_sharded_ckpt_v2 import ShardedConfig, blocks, shard
from nanotrain_sharded_ckpt_v2.checkpoint import ShardedCheckpoint
from test_guard import GUARDED, OneStepLRMultiplier
from test_run import metrics

from nanotrain_core.errors import CheckpointError
from nanotrain_core.run import model_parts
from nanotrain_core.run.random_state import seed_all
from nanotrain_core.run.restore import restore
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.checks.optimizer import whole_of
from nanotrain_core.testing.compare import assert_bitwise, assert_same, whole
from nanotrain_core.testing.probe import make_engine, make_run, train

ADAMW = {"use": "adamw", "lr": 0.01, "clip_norm": 0.5}
ZERO = {**ADAMW, "use": "zero12", "stage": 2, "bucket_mb": 0.01}


def case(optimizer, kind="sharded_v2", ranks=2, **overrides):
    tables = {"optimizer": optimizer, "checkpoint": {"use": kind}, **overrides}
    return Case("topology", use="grid", topology={"dp": ranks}, overrides=tables)


# --- ranks without a share --------------------------------------------------------------------------


def train_one_parameter(case, folder, **options):
    """Train the final norm alone: 32 numbers, which lie in the range of rank 0."""
    build = model_parts.build_stages

    def build_frozen(*arguments):
        stages = build(*arguments)
        for part in stages.values():
            for name, parameter in part.named_parameters():
                parameter.requires_grad_(name == "norm.weight")
        return stages

    with mock.patch.object(model_parts, "build_stages", build_frozen):
        changes = {"run": {"steps": 4}, "batch": {"sequences": 8, "microbatch": 1}}
        return train(case, changes, folder=folder, **options)


@pytest.mark.full_cases("torch-simple", "torch-sharded_v2", "auto-simple")
@pytest.mark.parametrize("kind", ["simple", "sharded_v2"])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_rank_that_owns_no_part_of_the_state_trains_saves_and_goes_on(tmp_path, kind, kernels):
    fp64 = {"precision": {"use": "fp64"}}
    sharded = case(ZERO, kind, kernels={"use": kernels}, **fp64)
    through = run_ranks(train_one_parameter, 2, sharded, tmp_path, save_at=2)
    assert [len(trace.state) for trace in through] == [3, 0]
    resumed = run_ranks(train_one_parameter, 2, sharded, tmp_path, save_at=2, resume="2")
    for one, other in zip(through, resumed, strict=True):
        assert_bitwise(whole_of(other), whole_of(one), "resumed")
    alone = run_ranks(train_one_parameter, 1, case(ADAMW, kind, 1, **fp64), tmp_path, resume="2")
    for part in ("weights", "state"):
        got, want = (whole([getattr(trace, part) for trace in traces]) for traces in (alone, through))
        assert_same(got, want, f"{part} on one rank", atol=1e-9)


# --- a slow disk ------------------------------------------------------------------------------------


@contextmanager
def slowly(seconds):
    """Have every copy, and every file, take its time."""

    def late(act):
        def wait_and_act(*arguments):
            time.sleep(seconds)
            return act(*arguments)

        return wait_and_act

    with (
        mock.patch.object(blocks.Copies, "take", late(blocks.Copies.take)),
        mock.patch.object(blocks, "write", late(blocks.write)),
    ):
        yield


def save_often(folder, kernels, seconds, asynchronous):
    often = {"checkpoint": {"every": 2, "keep": 99, "asynchronous": asynchronous}, "run": {"steps": 9}}
    with slowly(seconds):
        make_engine(case(ZERO, kernels={"use": kernels}), often, folder=folder).fit()


def files(folder):
    """Return the contents of all files of checkpoints below a folder, those set aside excepted."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.parent.name[:4] == "step")
    here = ((path.relative_to(folder), path) for path in found)
    return {name: path.read_bytes() for name, path in here if "superseded" not in str(name)}


@pytest.mark.full_cases("torch")
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_what_is_written_while_training_goes_on_is_the_step_that_was_saved(tmp_path, kernels):
    for name, seconds, asynchronous in (("beside", 0.05, True), ("at once", 0.0, False)):
        run_ranks(save_often, 2, tmp_path / name, kernels, seconds, asynchronous)
    beside, at_once = (files(tmp_path / name) for name in ("beside", "at once"))
    assert len(beside) == 5 * 5  # steps 2, 4, 6, 8 and 9: a manifest, and two files of each rank
    shards = [path for path in beside if path.suffix == ".safetensors"]
    assert [path for path in shards if beside[path] != at_once[path]] == []
    assert beside.keys() == at_once.keys()


def go_back(folder, seconds):
    """Train with a spike at step 23; a save is on its way when it is noticed."""
    tables = {**GUARDED, "optimizer": ZERO, "checkpoint": {"use": "sharded_v2", "every": 5, "keep": 2}}
    folder.mkdir(exist_ok=True)
    with slowly(seconds):
        engine = make_engine(case(ZERO), tables, folder=folder)
        engine.run = attrs.evolve(engine.run, optimizer=OneStepLRMultiplier(engine, 23, 300.0))
        engine.fit()
    return engine.run.feed.meta()


@pytest.mark.full
def test_a_rollback_takes_a_save_on_its_way_and_sharded_state_back_too(tmp_path):
    metas = [run_ranks(go_back, 2, tmp_path / name, wait) for name, wait in (("a", 0.0), ("b", 0.05))]
    assert metas[0] == metas[1]
    backs = [metrics(tmp_path / name, "rollback")[0] for name in ("a", "b")]
    assert [(back["onset"], back["restored"]) for back in backs] == [(23, 20)] * 2
    one, other = (files(tmp_path / name / "checkpoints/step-00000040") for name in ("a", "b"))
    assert len(one) == 5
    assert one == other


# --- damage that one host alone sees ----------------------------------------------------------------


def unreadable_on_rank_1(rank, step, full):
    """Have rank 1 fail to read the files of a step: when it compares them, or looks at what it will read."""
    damage, name = shard.damage, f"step-{step:08d}"

    def fail(folder, *arguments, **options):
        if rank == 1 and folder.name == name and options["full"] is full:
            return f"{folder} cannot be read: Stale file handle"
        return damage(folder, *arguments, **options)

    return mock.patch.object(shard, "damage", fail)


def go_back_unreadably(folder, full):
    tables = {**GUARDED, "optimizer": ZERO, "checkpoint": {"use": "sharded_v2", "every": 5, "keep": 9}}
    folder.mkdir(exist_ok=True)
    engine = make_engine(case(ZERO), tables, folder=folder)
    engine.run = attrs.evolve(engine.run, optimizer=OneStepLRMultiplier(engine, 23, 300.0))
    with unreadable_on_rank_1(engine.run.mesh.rank, 20, full):
        engine.fit()
    return sorted(path.name for path in folder.glob("checkpoints/superseded-*/step-*"))


@pytest.mark.full_cases("False")
@pytest.mark.parametrize("full", [True, False])
def test_all_ranks_go_back_to_a_checkpoint_that_each_can_read(tmp_path, full):
    """Rank 0 finds the newest whole: the other one's word counts as much."""
    aside = run_ranks(go_back_unreadably, 2, tmp_path, full)
    (back,) = metrics(tmp_path, "rollback")
    assert (back["onset"], back["restored"]) == (23, 15)
    assert aside[0][0] == "step-00000020"
    (end,) = metrics(tmp_path, "end")
    assert end["step"] == 40


def resume_unreadably(folder, full, steps):
    engine = make_engine(case(ZERO), {"checkpoint": {"every": 2, "keep": 9}}, folder=folder, resume="latest")
    with ExitStack() as patches:
        for step in steps:
            patches.enter_context(unreadable_on_rank_1(engine.run.mesh.rank, step, full))
        try:
            restore(engine)
        except CheckpointError as error:
            return str(error)
    return engine.step


@pytest.mark.full
@pytest.mark.full_cases("False")
@pytest.mark.parametrize("full", [True, False])
def test_all_ranks_resume_from_a_checkpoint_that_each_can_read(tmp_path, full):
    """One bad host sets nothing aside that all others could go on from, if it can read none."""
    run_ranks(save_often, 2, tmp_path, "auto", 0.0, True)
    steps = sorted(path.name for path in tmp_path.glob("checkpoints/step-*"))
    for error in run_ranks(resume_unreadably, 2, tmp_path, full, (2, 4, 6, 8, 9)):
        assert "is whole: " in error
        assert "Stale file handle" in error
    assert sorted(path.name for path in tmp_path.glob("checkpoints/step-*")) == steps
    assert run_ranks(resume_unreadably, 2, tmp_path, full, (8, 9)) == [6, 6]
    aside = sorted(path.name[:17] for path in tmp_path.glob("checkpoints/.corrupt-*"))
    assert aside == [".corrupt-00000008", ".corrupt-00000009"]


# --- all that is remembered -------------------------------------------------------------------------

EVERYTHING = {
    "run": {"steps": 6},
    "optimizer": {"lr_schedule": {"use": "cosine", "warmup_steps": 2}},
    "precision": {"use": "fp16", "initial_scale": 2.0**19, "growth_interval": 2},
    "checkpoint": {"every": 3, "keep": 9},
    "monitor": [{"use": "guard", "warmup": 4, "window": 8}],
}


def train_with_everything(folder, resume=None):
    """Train in halves, drawing from every stream; return the rates of the steps."""
    engine = make_engine(case(ZERO), EVERYTHING, folder=folder, resume=resume)
    train_step, rates = engine._train_step, []

    def draw():
        torch.rand(3), random.random()
        rates.append(engine.run.optimizer.inner.param_groups[0]["lr"])
        return train_step()

    engine._train_step = draw
    engine.fit()
    return rates


@pytest.mark.full
def test_two_runs_one_of_them_resumed_leave_the_same_bytes(tmp_path):
    """Manifests hold loss scale, data position, guard history and recipe; files state and random streams."""
    through = run_ranks(train_with_everything, 2, tmp_path / "a")
    run_ranks(train_with_everything, 2, tmp_path / "b")
    (tmp_path / "b/checkpoints/step-00000006").rename(tmp_path / "first")
    resumed = run_ranks(train_with_everything, 2, tmp_path / "b", resume="3")
    assert [rates[3:] for rates in through] == resumed
    assert all(one != other for one, other in pairwise(resumed[0]))
    saved = [files(tmp_path / name) for name in ("a", "b")]
    assert len(saved[0]) == 2 * 5
    assert saved[0] == saved[1]
    meta = json.loads((tmp_path / "a/checkpoints/step-00000006/MANIFEST.json").read_text())["meta"]
    assert meta["loss_scale"]["value"] < 2.0**24
    assert len(meta["monitors"]["Guard"]["good"]) == 6
    assert meta["data"]["position"] == 6 * 8
    assert 'use = "cosine"' in meta["recipe"]


def streams_of(folder, ranks, resume=None):
    engine = make_engine(case(ZERO, ranks=ranks), EVERYTHING, folder=folder, resume=resume)
    seed_all(1, engine.run.mesh.rank)
    restore(engine)
    return torch.rand(3).tolist(), random.random()


def test_on_another_layout_random_streams_are_neither_the_old_ones_nor_those_of_the_start(tmp_path):
    """They are drawn from seed and step, so that a second resume has the same."""
    run_ranks(train_with_everything, 2, tmp_path)
    (start,) = run_ranks(streams_of, 1, tmp_path / "empty", 1)
    found = [run_ranks(streams_of, 1, tmp_path, 1, resume=step)[0] for step in ("6", "3", "3")]
    assert found[1] == found[2]
    assert len({str(each) for each in (start, *found)}) == 3


def streams_on(folder, topology, kind, resume=None):
    tables = {"optimizer": ZERO, "checkpoint": {"use": kind}, "parallel": [{"use": "tp"}]}
    on = Case("topology", use="grid", topology=topology, overrides=tables)
    engine = make_engine(on, {"checkpoint": {"every": 3}}, folder=folder, resume=resume)
    if resume is None:
        engine.fit()
    else:
        restore(engine)
    return torch.get_rng_state().tolist()


@pytest.mark.full_cases("simple")
@pytest.mark.parametrize("kind", ["simple", "sharded_v2"])
def test_as_many_ranks_in_another_layout_do_not_take_each_others_streams(tmp_path, kind):
    saved = run_ranks(streams_on, 2, tmp_path, {"dp": 2}, kind)
    assert run_ranks(streams_on, 2, tmp_path, {"dp": 2}, kind, resume="3") == saved
    turned = run_ranks(streams_on, 2, tmp_path, {"tp": 2}, kind, resume="3")
    assert all(streams not in saved for streams in turned)


def stop_in_evaluation(engine, step):
    """Have the run request a stop once it reads a validation batch after ``step``."""
    validation = engine.run.feed.validation

    def stopping():
        if engine.step == step:
            engine.stop.request("preempted")
        yield from validation()

    engine.run.feed.validation = stopping


def evaluate_or_stop(folder, stop_at=None, resume=None):
    folder.mkdir(exist_ok=True)
    tables = {"evaluation": {"every": 2, "sequences": 8}, "monitor": [{"use": "jsonl"}]}
    on = case(ADAMW, ranks=1, **tables)
    engine = make_engine(on, {"run": {"steps": 4}}, folder=folder, resume=resume)
    stop_in_evaluation(engine, stop_at)
    return engine.fit().reason, [(row["step"], row["loss"]) for row in metrics(folder, "evaluation")]


@pytest.mark.full_cases("4")
@pytest.mark.parametrize("stop_at", [2, 4])
def test_an_evaluation_that_a_stop_cut_short_is_made_when_the_run_is_resumed(tmp_path, stop_at):
    """The last one was never made: the next launch said that all was done."""
    _, through = evaluate_or_stop(tmp_path / "through")
    assert [step for step, _ in through] == [0, 2, 4]
    reason, found = evaluate_or_stop(tmp_path / "stopped", stop_at)
    assert (reason, found) == ("preempted", through[: stop_at // 2])
    assert evaluate_or_stop(tmp_path / "stopped", resume="latest") == ("done", through)


def test_a_second_call_of_fit_goes_on_and_does_not_resume_once_more(tmp_path):
    """It took the first call's steps again, and set its checkpoints aside."""
    on = case(ADAMW, ranks=1)
    often = {"checkpoint": {"every": 1, "keep": 9}, "run": {"steps": 4}}
    make_engine(on, often, folder=tmp_path).fit(steps=2)
    engine = make_engine(on, often, folder=tmp_path, resume="2")
    engine.fit(steps=3)
    assert engine.fit(steps=4).tokens == 4 * engine.run.feed.tokens_per_step
    assert list(tmp_path.glob("checkpoints/superseded-*")) == []
    assert sorted(path.name[-1] for path in tmp_path.glob("checkpoints/step-*")) == ["1", "2", "3", "4"]


# --- clocks -----------------------------------------------------------------------------------------


def due_by_the_clock(folder, hours):
    """Return what each of two ranks says a minute later, by its own clock, and by one that is far ahead."""
    checkpoint = ShardedCheckpoint(ShardedConfig(every_minutes=1.0))
    mesh = make_run(case(ZERO), {}).mesh
    checkpoint.open(folder, mesh)
    ahead = 3600 * hours[mesh.rank]
    with mock.patch.object(time, "monotonic", partial(lambda now, more: now() + more, time.monotonic, ahead)):
        return checkpoint.due(1)


@pytest.mark.parametrize(("hours", "due"), [((0, 5), False), ((5, 0), True), ((0, 0), False)])
def test_all_ranks_save_by_the_clock_of_the_first(tmp_path, hours, due):
    assert run_ranks(due_by_the_clock, 2, tmp_path, hours) == [due, due]
