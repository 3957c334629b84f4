"""What cannot fit into memory is refused by name, and an allocation that fails early is no traceback."""

import numpy as np
import pytest
import torch
from command import nanotrain
from test_run import SMALL

from nanotrain_core.errors import Exit, NanotrainError
from nanotrain_core.run import memory
from nanotrain_core.run.host_memory import HostMemory, host_memory
from nanotrain_core.run.memory import explain_out_of_memory
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine
from nanotrain_core.watch.progress import Progress

GIB = 2**30


def tree(root, **files):
    """Write files whose names have two underscores where paths have slashes."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_memory_is_what_the_control_group_leaves_of_the_host(tmp_path):
    assert host_memory(tmp_path).most == 0
    tree(tmp_path, proc__meminfo=f"MemTotal: {64 * 2**20} kB\nHugePages_Total: 0\n")
    tree(tmp_path, proc__self__cgroup="0::/job/step\n")
    assert host_memory(tmp_path).most == 64 * GIB
    tree(tmp_path, **{"sys__fs__cgroup__job__memory.max": f"{8 * GIB}\n"})
    tree(tmp_path, **{"sys__fs__cgroup__job__step__memory.max": "max\n"})
    assert host_memory(tmp_path).most == 8 * GIB
    tree(tmp_path, proc__self__cgroup="5:cpu:/a\n3:memory:/docker/b\n")
    tree(tmp_path, **{"sys__fs__cgroup__memory__memory.limit_in_bytes": f"{16 * GIB}\n"})
    assert host_memory(tmp_path).most == 16 * GIB
    tree(tmp_path, proc__meminfo=f"MemTotal: {64 * 2**20} kB\nSwapTotal: {2**20} kB\n")
    assert host_memory(tmp_path).most == 17 * GIB


@pytest.mark.parametrize(("ranks", "whose"), [(1, "rank 0"), (2, "all 2 ranks")])
def test_a_model_larger_than_the_host_is_refused_before_it_is_allocated(tmp_path, ranks, whose):
    """It passed `check` and was then a traceback, or killed by the system."""
    (tmp_path / "small.toml").write_text(SMALL)
    words = ("run", "small.toml", "--nproc", str(ranks), "--set", "model.width=1048576")
    ended = nanotrain(*words, "--folder", "run", cwd=tmp_path)
    assert (ended.code, "Traceback" in ended.err) == (Exit.USER, False), ended.err
    assert f"weights of {whose} take {70369 * ranks}." in ended.err
    assert "in all: lower model.width = 1048576, model.vocab = 64" in ended.err


def bytes_of_weights(engine):
    return sum(placed.parameter.nbytes for placed in engine.run.placed)


def test_weights_that_fit_are_refused_where_gradients_and_moments_do_not(monkeypatch):
    case = Case("optimizer", use="adamw")
    weights = bytes_of_weights(make_engine(case, {}))
    monkeypatch.setattr(memory, "host_memory", lambda: HostMemory(weights - 1))
    with pytest.raises(NanotrainError, match=r"^weights of rank 0 take"):
        make_engine(case, {})
    monkeypatch.setattr(
        memory, "host_memory", lambda: HostMemory(4 * weights)
    )  # each has a count of steps too
    with pytest.raises(NanotrainError, match=r"^weights, gradients and optimizer state of rank 0 take"):
        make_engine(case, {})
    monkeypatch.setattr(memory, "host_memory", lambda: HostMemory(int(4.1 * weights)))
    make_engine(case, {})
    monkeypatch.setattr(memory, "host_memory", lambda: HostMemory(0))  # unknown
    make_engine(case, {})


def test_weights_that_are_packed_and_trained_count_twice_when_a_run_starts(monkeypatch):
    """Their masters are created from the values before packing, which are kept until then."""
    case = Case("precision", use="fp4_master")
    weights = bytes_of_weights(make_engine(case, {}))  # in bfloat16
    monkeypatch.setattr(memory, "host_memory", lambda: HostMemory(weights))
    with pytest.raises(NanotrainError, match=r"^weights of rank 0 take"):
        make_engine(case, {})


@pytest.mark.parametrize("take", [torch.empty, np.empty], ids=["torch", "numpy"])
def test_a_failed_allocation_names_what_to_change_until_the_first_step_is_done(take):
    recipe, progress = make_engine(Case("optimizer", use="adamw"), {}).run.recipe, Progress()
    said = r"rank 3 is out of memory .*batch\.microbatch = .*model\."
    with pytest.raises(NanotrainError, match=said) as few, explain_out_of_memory(recipe, 3, progress):
        take(2**55)
    assert few.value.exit_code == Exit.USER
    progress.note("data", 1)
    kept = pytest.raises((RuntimeError, MemoryError))  # a restart may help
    with kept, explain_out_of_memory(recipe, 3, progress):
        take(2**55)


def test_other_errors_of_the_first_step_stay_what_they_are():
    recipe = make_engine(Case("optimizer", use="adamw"), {}).run.recipe
    kept = pytest.raises(RuntimeError, match="shapes cannot be multiplied")
    with kept, explain_out_of_memory(recipe, 0, Progress()):
        torch.ones(2, 3) @ torch.ones(2, 3)


def test_a_batch_larger_than_the_host_is_no_traceback(tmp_path):
    (tmp_path / "small.toml").write_text(SMALL)
    large = ("batch.length=2000000000", "batch.sequences=16384", "batch.microbatch=16384")
    words = [word for key in (*large, "data.sequences=16384") for word in ("--set", key)]
    ended = nanotrain("run", "small.toml", "--folder", "run", *words, cwd=tmp_path)
    assert (ended.code, "Traceback" in ended.err) == (Exit.USER, False), ended.err
    assert "rank 0 is out of memory before its first step is done" in ended.err
    assert "lower batch.microbatch = 16384, batch.length = 2000000000" in ended.err
