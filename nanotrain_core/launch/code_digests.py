"""What the hosts of a run must have alike: versions, and digests of code, as an edit changes no version."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from nanotrain_core.errors import Exit, LaunchError
from nanotrain_core.recipe import Recipe
from nanotrain_core.registry.registry import Registry, cached_version

#: Libraries whose versions can change the numbers of a run, in addition to torch.
LIBRARIES = ("numpy", "safetensors", "tokenizers")
_CORE = Path(__file__).parents[1]
#: Tools for tests: no part of a run.
_NOT_RUN = str(_CORE / "testing")


def environment_facts(
    registry: Registry, used: Collection[str], *, with_code: bool = True
) -> Mapping[str, str | None]:
    """Return the versions and the code of this process, each by the name in which an error reports it.

    Args:
        registry: the plugins.
        used: the distributions that the run uses.
        with_code: whether to read their code: one rank of a host is enough, as many read one file server.

    Returns:
        The facts; None for one that is not to be compared.
    """
    found: dict[str, str | None] = {**registry.versions()}
    found["Python"] = ".".join(platform.python_version_tuple()[:2])
    for library in LIBRARIES:
        found[library] = None  # a run that needs one says so where it is missing
        with suppress(PackageNotFoundError):
            found[library] = cached_version(library)
    digests = code_digests(registry, used) if with_code else dict.fromkeys(used, None)
    # The first digits are enough to tell two apart, and for a person to compare.
    return {**found, **{f"the code of {name}": text and text[:16] for name, text in digests.items()}}


def code_digests(registry: Registry, used: Collection[str]) -> Mapping[str, str]:
    """Return, by distribution, the SHA-256 of the code of those that are ``used``: the core and plugins.

    What counts is Python source and its place within a package, not where that is installed. Each is read
    once in a process. The content of an archive does not count.
    """
    usable = [plugin for plugin in registry.plugins if not plugin.error and plugin.distribution in used]
    packages: dict[str, set[Path]] = {}
    for plugin in usable:
        if not plugin.local and (package := _package(plugin.module)) is not None:
            packages.setdefault(plugin.distribution, set()).add(package)
    if "nanotrain-core" in used:
        packages["nanotrain-core"] = {_CORE}  # which has the built-in components, too
    local = {plugin.distribution: plugin.version for plugin in usable if plugin.local}
    return {**{name: _digest(frozenset(found)) for name, found in packages.items()}, **local}


def used_code(registry: Registry, recipe: Recipe) -> Mapping[str, str]:
    """Return the digests of the core and of the plugins whose components a recipe selects."""
    return code_digests(registry, recipe.versions)


def expect_unchanged(since: Mapping[str, str], registry: Registry) -> None:
    """Check that the code of an attempt is that of the launch.

    Ranks are forked from a process that has imported part of it: after an edit they would run a mixture.

    Args:
        since: what :func:`used_code` returned in the launcher.
        registry: the plugins as this process has loaded them.

    Raises:
        LaunchError: it is not, which a new launcher cures and a restart does not: with the code for which
            scripts start it again.
    """
    if since:
        _digest.cache_clear()  # of an earlier attempt in this process: other ranks may have new processes
        now = code_digests(registry, since)
        if changed := sorted(name for name, digest in since.items() if now.get(name) != digest):
            text = f"the code of {' and '.join(changed)} has changed since this launch"
            raise LaunchError(f"{text}: start it again with --resume auto").with_code(Exit.FAILED)


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


@cache
def _digest(packages: frozenset[Path]) -> str:
    digest = hashlib.sha256()
    for package in sorted(packages):
        for name, file in _sources(package):
            # Deleted meanwhile, unreadable, in an archive, or a link that an editor uses as a lock.
            with suppress(OSError):
                if os.path.isfile(file):
                    text = Path(file).read_bytes()
                    digest.update(f"{name} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def _sources(package: Path) -> Iterator[tuple[str, str]]:
    """Yield the path of each source file within the parent folder of ``package``, and its path."""
    files: list[str] = []
    for folder, below, names in os.walk(package):
        below[:] = (each for each in below if each[0] != "." and os.path.join(folder, each) != _NOT_RUN)
        files += [os.path.join(folder, each) for each in names if each.endswith(".py") and each[0] != "."]
    for file in sorted(files) or [str(package)]:
        yield os.path.relpath(file, package.parent), file
