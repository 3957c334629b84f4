"""Print a pip constraint for each library that the workspace depends on: its lowest admitted version.

``python .ci/oldest_versions.py [FOLDER]`` reads pyproject.toml of the core and of every plugin. Where two
name one library, the higher bound holds, since both are to be installed.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version


def declared(project: dict[str, object]) -> Iterator[Requirement]:
    """Yield the requirements of a ``[project]`` table, those of its extras included."""
    extras = project.get("optional-dependencies", {})
    for texts in (project.get("dependencies", []), *extras.values()):
        yield from map(Requirement, texts)


def lowest(requirement: Requirement) -> Version | None:
    """Return the version after ``>=``, or None where there is none."""
    return next((Version(each.version) for each in requirement.specifier if each.operator == ">="), None)


def lower_bounds(root: Path) -> dict[str, set[Version]]:
    """Return every lower bound of each library, by its name, of the workspace in ``root``."""
    found: dict[str, set[Version]] = {}
    for path in (root / "pyproject.toml", *sorted(root.glob("plugins/*/pyproject.toml"))):
        for requirement in declared(tomllib.loads(path.read_text(encoding="utf-8"))["project"]):
            bound = lowest(requirement)
            if bound is not None:
                found.setdefault(requirement.name, set()).add(bound)
    return found


if __name__ == "__main__":
    here = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    for name, bounds in sorted(lower_bounds(here).items()):
        if not name.startswith("nanotrain-"):
            print(f"{name}=={max(bounds)}")
