"""The pool of ranks: results, first causes, stacks, and recovery."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from nanotrain_core.run.folder_owner import is_alive
from nanotrain_core.testing import Pool, RankFailure, run_ranks
from nanotrain_core.testing.pool import COLLECTIVE_CHECKS, RANK_TIMEOUT


def ranks_sum(offset):
    value = torch.tensor([dist.get_rank() + offset], dtype=torch.float64)
    dist.all_reduce(value)
    return value, os.getpid()


def leave_everything_changed():
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    torch.manual_seed(dist.get_rank() + 99)
    return torch.rand(1)


def settings():
    deterministic = torch.are_deterministic_algorithms_enabled()
    return (
        torch.get_default_dtype(),
        deterministic,
        torch.is_grad_enabled(),
        torch.rand(1),
        torch.get_num_threads(),
    )


def rank_one_raises():
    if dist.get_rank() == 1:
        raise ValueError("the real reason")
    dist.all_reduce(torch.ones(1))


def rank_one_leaves():
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        time.sleep(0.3)
        raise ValueError("the real reason")
    dist.all_reduce(torch.ones(1))


def crossed_receives():
    dist.recv(torch.ones(1), src=1 - dist.get_rank())


def different_shapes():
    dist.all_reduce(torch.ones(1 + dist.get_rank()))


def forgotten_collective():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))


def kill_myself(number):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), number)
    dist.all_reduce(torch.ones(1))


def big_world():
    dist.init_process_group("fake", rank=5, world_size=4096)
    size = dist.get_world_size()
    dist.destroy_process_group()
    return size


def debug_level():
    return dist.get_debug_level()


def text_of(function, *args, timeout=20.0):
    with pytest.raises(RankFailure) as failure:
        run_ranks(function, 2, *args, timeout=timeout)
    return str(failure.value)


def test_every_rank_returns_its_result_by_value():
    results = run_ranks(ranks_sum, 2, 10.0)
    assert [value.item() for value, _ in results] == [21.0, 21.0]
    assert all(value.dtype == torch.float64 and not value.is_shared() for value, _ in results)


def test_the_same_processes_serve_every_call():
    first, second = run_ranks(ranks_sum, 2, 0.0), run_ranks(ranks_sum, 2, 0.0)
    assert [pid for _, pid in first] == [pid for _, pid in second]


def test_a_function_cannot_change_the_settings_of_the_next():
    run_ranks(leave_everything_changed, 2)
    results = run_ranks(settings, 2)
    dtype, deterministic, grad, drawn, threads = results[0]
    assert (dtype, deterministic, grad, threads) == (torch.float32, False, True, 1)
    assert drawn == results[1][3] == torch.rand(1, generator=torch.Generator().manual_seed(0))


def test_the_rank_that_raised_comes_first_with_its_traceback():
    text = text_of(rank_one_raises)
    assert text.startswith("rank 1 of 2 ValueError: the real reason\nTraceback")
    assert "in rank_one_raises" in text
    assert text.splitlines()[-1].startswith("rank 0 of 2 also: did not return 1 s after the first failure")


def test_a_closed_connection_is_never_taken_for_the_cause():
    text = text_of(rank_one_leaves)
    assert text.startswith("rank 1 of 2 ValueError: the real reason")


def test_a_deadlock_shows_the_stack_of_every_rank():
    text = text_of(crossed_receives, timeout=1.5)
    for rank in (0, 1):
        assert f"rank {rank} of 2 did not return within 1.5 s" in text
    assert text.count("in crossed_receives") == 2


def test_a_session_can_give_ranks_another_time(monkeypatch):
    monkeypatch.setenv(RANK_TIMEOUT, "1.5")
    assert "rank 0 of 2 did not return within 1.5 s" in text_of(crossed_receives, timeout=None)


@pytest.mark.parametrize("mistake", [different_shapes, forgotten_collective])
def test_mismatched_collectives_are_named(mistake, monkeypatch):
    monkeypatch.delenv(COLLECTIVE_CHECKS, raising=False)
    assert "Detected mismatch between collectives" in text_of(mistake)


def test_a_session_can_do_without_comparing_collectives(monkeypatch):
    monkeypatch.setenv(COLLECTIVE_CHECKS, "off")
    assert run_ranks(debug_level, 2) == [dist.DebugLevel.OFF] * 2
    assert run_ranks(debug_level, 2, check_collectives=True) == [dist.DebugLevel.DETAIL] * 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_dead_rank_is_reported_with_its_signal(number):
    text = text_of(kill_myself, number)
    assert text.startswith(f"rank 1 of 2 died of {number.name}")


def test_a_crash_in_c_code_shows_where_python_was():
    assert "in kill_myself" in text_of(kill_myself, signal.SIGSEGV)


def test_after_any_failure_the_next_call_works():
    text_of(kill_myself, signal.SIGKILL)
    assert [value.item() for value, _ in run_ranks(ranks_sum, 2, 1.0)] == [3.0, 3.0]


def test_a_pool_closed_between_calls_starts_again():
    pool = Pool(1)
    first = pool.run(ranks_sum, 0.0)[0][1]
    pool.close()
    assert pool.run(ranks_sum, 0.0)[0][1] != first
    pool.close()


def test_without_a_backend_the_function_makes_its_own_group():
    assert run_ranks(big_world, 1, backend=None) == [4096]


def test_a_closure_is_refused_with_the_reason():
    with pytest.raises(TypeError, match=r"top level of a module, not .*<lambda>"):
        run_ranks(lambda: None, 2)


def test_importing_the_testing_package_does_not_import_torch():
    code = "import nanotrain_core.testing.pytest_plugin, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


POOL = """
import os, sys
from nanotrain_core.testing import pool

def busy(folder):
    open(f"{folder}/{os.getpid()}.pid", "w").close()
    while True:
        pass

if __name__ == "__main__":
    pool.PRELOAD = ["torch"]
    pool.run_ranks(busy, 2, sys.argv[1], backend=None, timeout=600.0)
"""


def holds(condition, seconds=120.0):
    """Return whether a condition comes to hold within a time that no machine is too busy for."""
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


@pytest.mark.full
def test_ranks_end_with_the_process_that_has_the_pool(tmp_path):
    script = tmp_path / "pool_of_two.py"
    script.write_text(POOL)
    process = subprocess.Popen([sys.executable, script, tmp_path])
    try:
        assert holds(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    finally:
        process.kill()  # it has no chance to close its pool
        process.wait()
    ranks = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert holds(lambda: not any(map(is_alive, ranks)))
