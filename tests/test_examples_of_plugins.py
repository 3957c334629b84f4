"""The plugins of docs/examples/plugins are short; ``test_example_*.py`` try what each does."""

import pytest
from examples_of_plugins import PLUGINS


@pytest.mark.parametrize("path", sorted(PLUGINS.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path):
    assert len(path.read_text().splitlines()) < 120
