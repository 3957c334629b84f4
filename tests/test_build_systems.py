"""How packages are built: one backend for the core, and one for plugins.

`.ci/run` installs the two once for all packages; `.ci/wheels` builds the core and one plugin with what they
declare alone, and by this test it then builds each of them.
"""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def build_system(text):
    return tomllib.loads(text)["build-system"]


def test_all_plugins_are_built_as_new_plugin_writes_it():
    template = (ROOT / "nanotrain_core/cli/templates/pyproject.toml.txt").read_text(encoding="utf-8")
    expected = build_system(template.partition("[project]")[0])
    for path in ROOT.glob("plugins/*/pyproject.toml"):
        assert build_system(path.read_text(encoding="utf-8")) == expected, path


def test_the_backends_are_there_for_builds_without_isolation():
    developer = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").split()
    for path in (ROOT / "pyproject.toml", ROOT / "plugins/tp/pyproject.toml"):
        (requirement,) = build_system(path.read_text(encoding="utf-8"))["requires"]
        assert requirement.partition(">=")[0] in developer
