"""A pytest plugin: of a parametrised test's cases one for each first parameter.

For plugins installed alone from their wheels: what fails there, and not in the checkout, is an import, which
fails in each case that needs it. All cases have run in the checkout before. The first parameter of a
conformance test is the component.
"""

from __future__ import annotations

import pytest


@pytest.hookimpl(trylast=True)  # after cases that a marker leaves out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the first case of each test function and first parameter."""
    first: dict[str, pytest.Item] = {}
    for item in items:
        function, _, case = item.nodeid.partition("[")
        first.setdefault(f"{function}[{case.partition('-')[0]}", item)
    kept = {id(item) for item in first.values()}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = first.values()
