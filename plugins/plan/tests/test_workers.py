"""Processes that are forked for a plan or a sweep, from one that has used OpenMP's threads."""

import os
import signal
import subprocess
import sys
from functools import partial

import pytest
from nanotrain_plan.forks import call_in_forks

ADDS_AFTER_A_FORK = """
import torch
from nanotrain_plan.workers import Workers

class Adds:
    most = 1
    def compare(self, family, known):
        return [torch.ones(2_000_000).sum().item()]

torch.ones(2_000_000).sum()  # in threads
with Workers(Adds(), 2) as workers:
    print([found for found in workers.compare([None])])
"""


@pytest.mark.full
def test_a_worker_needs_no_thread_that_its_fork_does_not_have():
    command = [sys.executable, "-c", ADDS_AFTER_A_FORK]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    told = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=120)
    assert told.stdout == "[[2000000.0]]\n", told.stderr


def test_calls_return_in_their_order_and_run_in_other_processes():
    here = os.getpid()
    found = call_in_forks([partial(lambda number: (number, os.getpid()), number) for number in range(3)], 2)
    assert [number for number, _ in found] == [0, 1, 2]
    assert here not in {process for _, process in found}
    assert call_in_forks([os.getpid, os.getpid], 1) == [here, here]


def test_an_error_of_a_forked_call_is_raised_here():
    def fails() -> None:
        raise NotImplementedError("a step reads float32 [4] on the host")

    with pytest.raises(NotImplementedError, match=r"a step reads float32 \[4\] on the host"):
        call_in_forks([os.getpid, fails], 2)


def test_calls_of_a_fork_that_is_killed_are_made_here():
    here = os.getpid()

    def dies_elsewhere() -> int:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return 7

    assert call_in_forks([os.getpid, dies_elsewhere], 2) == [here, 7]
