"""Fixtures that tests of several packages together use as well, and which cases are ``full``."""

import gc
from collections import defaultdict
from collections.abc import Generator

import pytest
from s3_server import server  # noqa: F401


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected, and none of what was made for them afterwards.

    Modules and tests stay to the end: every worker looked at them for a quarter of that time, and again in
    each later collection.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give the cases that ``@pytest.mark.full_cases("id", ...)`` names the marker ``full``.

    Raises:
        pytest.UsageError: a test has no case of that name; checked where all of its cases were collected.
    """
    cases: dict[tuple[str, tuple[str, ...]], set[str]] = defaultdict(set)
    for item in items:
        for mark in item.iter_markers("full_cases"):
            called = getattr(item, "callspec", None)
            case = called.id if called is not None else ""
            cases[item.nodeid.partition("[")[0], mark.args].add(case)
            if case in mark.args:
                item.add_marker(pytest.mark.full)
    if not any("[" in argument for argument in config.args):
        missing = {test: sorted(set(names) - found) for (test, names), found in cases.items()}
        wrong = [f"{test} has no case {name!r}" for test, names in missing.items() for name in names]
        if wrong:
            raise pytest.UsageError("full_cases: " + "; ".join(wrong))
