"""A pytest plugin: few of the tests of a package that is installed alone from its wheel.

What fails there, and not in the checkout, is an import, or a file that the wheel lacks. All test files are
collected, so their imports run; `tests/test_architecture.py` reads the imports of every module and test.
What runs is chosen by ``CASES``: ``file``, one case of each file; ``two`` of those, with that of the
conformance tests if there are any; ``ends``, one case of each file and its last.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

#: The check of the harness that imports a component whole, in this process; the first starts one of its own.
IMPORTS = "factory_can_be_imported"


def chosen(items: Sequence[pytest.Item], which: str) -> list[pytest.Item]:
    """Return the items that run."""
    first: dict[str, pytest.Item] = {}
    last: dict[str, pytest.Item] = {}
    for item in items:
        file = item.path.name
        if file not in first or (IMPORTS in item.name and IMPORTS not in first[file].name):
            first[file] = item
        last[file] = item
    if which == "two":
        return sorted(first.values(), key=lambda item: item.path.name != "test_conformance.py")[:2]
    if which == "ends":
        return [item for item in items if item in (first[item.path.name], last[item.path.name])]
    assert which == "file", which
    return [*first.values()]


@pytest.hookimpl(trylast=True)  # after cases that a marker leaves out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what is chosen."""
    kept = chosen(items, os.environ["CASES"])
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
