"""A pytest plugin: of each file of tests the first case of its first test function.

For plugins installed alone from their wheels: what fails there, and not in the checkout, is an import, or a
file that the wheel lacks, which most tests need. All tests have run in the checkout before, where
`tests/test_architecture.py` reads every import of every module.
"""

from __future__ import annotations

import pytest


@pytest.hookimpl(trylast=True)  # after cases that a marker leaves out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the first case of the first test function of each file."""
    first: dict[str, pytest.Item] = {}
    for item in items:
        first.setdefault(item.nodeid.partition("::")[0], item)
    kept = {*first.values()}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
