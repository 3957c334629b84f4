"""Freed tensors are found again: a second one of the same size costs no page faults."""

import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = """
import resource, torch
from nanotrain_core.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)  # 64 MB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
print(faults(), faults())
"""
CHOICE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.fixture(scope="module")
def faults():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    return [int(number) for number in done.stdout.split()]


def test_memory_is_kept(faults):
    assert faults[1] < 64


def test_memory_comes_in_large_pages_where_the_kernel_has_them(faults):
    large = CHOICE.is_file() and "[never]" not in CHOICE.read_text(encoding="utf-8")
    assert faults[0] < (2048 if large else 2**15)
