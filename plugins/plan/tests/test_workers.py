"""Processes of a sweep, forked from one that has used OpenMP's threads."""

import os
import subprocess
import sys

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


def test_a_worker_needs_no_thread_that_its_fork_does_not_have():
    command = [sys.executable, "-c", ADDS_AFTER_A_FORK]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    told = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=120)
    assert told.stdout == "[[2000000.0]]\n", told.stderr
