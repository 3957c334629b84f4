"""A pytest plugin: few of the tests of a package that is installed alone from its wheel.

What fails there, and not in the checkout, is an import, or a file that the wheel lacks. All test files are
collected, so their imports run; `tests/test_architecture.py` reads the imports of every module and test.
What runs is chosen by ``CASES``: ``file``, the first case of each file; ``two`` of those, with that of the
conformance tests if there are any; ``ends``, the first case of all and the last.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest


def chosen(items: Sequence[pytest.Item], which: str) -> list[pytest.Item]:
    """Return the items that run."""
    if which == "ends":
        return [*items[:1], *items[1:][-1:]]
    first: dict[str, pytest.Item] = {}
    for item in items:
        first.setdefault(item.path.name, item)
    if which == "two":
        return sorted(first.values(), key=lambda item: item.path.name != "test_conformance.py")[:2]
    assert which == "file", which
    return [*first.values()]


@pytest.hookimpl(trylast=True)  # after cases that a marker leaves out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what is chosen."""
    kept = chosen(items, os.environ["CASES"])
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
