"""What the hosts of a run must have alike: versions, and digests of code, as an edit changes no version."""

from __future__ import annotations

import hashlib
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from nanotrain_core.errors import LaunchError
from nanotrain_core.recipe import Recipe
from nanotrain_core.registry.registry import Registry, cached_version

#: Libraries whose versions can change the numbers of a run, in addition to torch.
LIBRARIES = ("numpy", "safetensors", "tokenizers")


def environment_facts(registry: Registry) -> Mapping[str, str]:
    """Return the versions and the code of this process, each by the name in which an error reports it."""
    found = {**registry.versions(), "Python": ".".join(platform.python_version_tuple()[:2])}
    for library in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[library] = cached_version(library)
    # The first digits are enough to tell two apart, and for a person to compare.
    return {**found, **{f"the code of {name}": text[:16] for name, text in code_digests(registry).items()}}


def code_digests(registry: Registry) -> Mapping[str, str]:
    """Return, by distribution, the SHA-256 of the core's code and of each usable plugin's.

    What counts is Python source and its place within a package, not where that is installed.
    """
    usable = [plugin for plugin in registry.plugins if not plugin.error]
    packages: dict[str, set[Path]] = {}
    for plugin in usable:
        if not plugin.local and (package := _package(plugin.module)) is not None:
            packages.setdefault(plugin.distribution, set()).add(package)
    packages["nanotrain-core"] = {Path(__file__).parents[1]}  # which has the built-in components, too
    local = {plugin.distribution: plugin.version for plugin in usable if plugin.local}
    return {**{name: _digest(found) for name, found in packages.items()}, **local}


def used_code(registry: Registry, recipe: Recipe) -> Mapping[str, str]:
    """Return the digests of the core and of the plugins whose components a recipe selects."""
    return {name: text for name, text in code_digests(registry).items() if name in recipe.versions}


def expect_unchanged(since: Mapping[str, str], registry: Registry) -> None:
    """Check that the code of an attempt is that of the launch.

    Ranks are forked from a process that has imported part of it: after an edit they would run a mixture.

    Args:
        since: what :func:`used_code` returned in the launcher.
        registry: the plugins as this process has loaded them.

    Raises:
        LaunchError: it is not, which a new launcher cures and a restart does not.
    """
    if since:
        now = code_digests(registry)
        if changed := sorted(name for name, digest in since.items() if now.get(name) != digest):
            text = f"the code of {' and '.join(changed)} has changed since this launch"
            raise LaunchError(f"{text}: start it again with --resume auto")


def _package(module: str) -> Path | None:
    """Return the folder of the outermost package of an imported module, or its file if it is in none.

    A folder without ``__init__.py`` is not counted: several distributions may share it.
    """
    names = re.split("[.:]", module)
    for count in range(1, len(names) + 1):
        file = getattr(sys.modules.get(".".join(names[:count])), "__file__", None)
        if file is not None:
            return Path(file).parent if Path(file).stem == "__init__" else Path(file)
    return None


def _digest(packages: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for package in sorted(packages):
        for name, file in _sources(package):
            with suppress(FileNotFoundError):  # deleted meanwhile, or a link that an editor uses as a lock
                text = file.read_bytes()
                digest.update(f"{name} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def _sources(package: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the path of each source file within the parent folder of ``package``, and its path."""
    for file in sorted(package.rglob("*.py")) if package.is_dir() else [package]:
        name = file.relative_to(package.parent)
        if not any(part.startswith(".") for part in name.parts):
            yield name, file
