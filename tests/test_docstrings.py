"""Examples in docstrings do what they show."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = [ROOT, *ROOT.glob("plugins/*")]


def modules():
    """Yield the name of every module of the core and of plugins with an example."""
    for folder in FOLDERS:
        for path in sorted(folder.glob("nanotrain_*/**/*.py")):
            if "\n    >>> " in path.read_text(encoding="utf-8"):
                yield ".".join(path.relative_to(folder).with_suffix("").parts)


MODULES = sorted(modules())


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_true(name):
    found = doctest.testmod(importlib.import_module(name))
    assert (found.failed, found.attempted > 0) == (0, True)
