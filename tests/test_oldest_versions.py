"""The oldest versions that the packages admit: one of each library, and a core with all names they use.

``.ci/oldest`` installs these bounds, torch's among them, and runs tests.
"""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from api_modules import API_MODULES
from packaging.requirements import Requirement
from packaging.version import Version

import nanotrain_core

ROOT = Path(__file__).parents[1]
SNAPSHOTS = Path(__file__).parent
PLUGINS = sorted(ROOT.glob("plugins/*/pyproject.toml"))


def requirements(path):
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    extras = project.get("optional-dependencies", {}).values()
    return [Requirement(text) for texts in (project["dependencies"], *extras) for text in texts]


def lower_bound(requirement):
    return next((Version(each.version) for each in requirement.specifier if each.operator == ">="), None)


def test_a_library_has_one_lower_bound_in_all_packages():
    """The oldest versions are tested together: of two bounds the lower would be tested nowhere."""
    found = {}
    for path in (ROOT / "pyproject.toml", *PLUGINS):
        for requirement in requirements(path):
            if not requirement.name.startswith("nanotrain-") or lower_bound(requirement):
                found.setdefault(requirement.name, {}).setdefault(lower_bound(requirement), path.parent.name)
    assert {name: bounds for name, bounds in found.items() if len(bounds) > 1} == {}
    assert None not in {bound for bounds in found.values() for bound in bounds}


def test_the_job_installs_those_bounds():
    command = [sys.executable, ROOT / ".ci/oldest_versions.py"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    bound = next(lower_bound(each) for each in requirements(ROOT / "pyproject.toml") if each.name == "torch")
    assert f"torch=={bound}" in printed
    assert not any(line.startswith("nanotrain") for line in printed)


def names_of(version):
    """Return what plugins might import from a core of that version, by API module: its snapshot says."""
    current = Version(nanotrain_core.__version__).release[:2]
    name = (
        "contracts.txt"
        if version.release[:2] == current
        else f"contracts-{version.major}.{version.minor}.txt"
    )
    apis = {}
    for section in (SNAPSHOTS / name).read_text(encoding="utf-8").split("\n\n"):
        title, *lines = section.splitlines()
        if title in API_MODULES:
            apis[title] = {line.strip() for line in lines}
    return apis


def imported(package):
    """Yield (module, name) for each name that a package imports from an API module of the core."""
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in API_MODULES:
                yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: path.parent.name)
def test_a_plugin_uses_no_name_that_the_oldest_core_it_admits_lacks(path):
    core = next(each for each in requirements(path) if each.name == "nanotrain-core")
    apis = names_of(lower_bound(core))
    used = {use for package in path.parent.glob("nanotrain_*") for use in imported(package)}
    submodules = {tuple(api.rsplit(".", 1)) for api in API_MODULES}
    assert {(api, name) for api, name in used if name not in apis[api]} - submodules == set()
    assert nanotrain_core.__version__ in core.specifier
