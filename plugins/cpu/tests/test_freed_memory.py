"""Freed tensors are found again: a second one of the same size costs no page faults."""

import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = """
import resource, torch
from nanotrain_cpu.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)  # 64 MB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
print(faults(), faults())
print(*[line for line in open("/proc/self/smaps") if line.startswith("VmFlags")])
"""
CHOICE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.fixture(scope="module")
def said():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    return done.stdout.partition("\n")


@pytest.mark.full
def test_memory_is_kept(said):
    _, again = said[0].split()
    assert int(again) < 64


@pytest.mark.full
def test_large_pages_are_asked_for_where_the_kernel_has_them(said):
    """Whether it gives them depends on what memory is free in one piece."""
    assert ("hg" in said[2].split()) == CHOICE.is_file()
