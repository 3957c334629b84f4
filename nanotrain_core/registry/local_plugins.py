"""Loads what ``--plugin PATH`` names: a file, the folder of a package, or that of a distribution."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import tomli
from packaging.utils import canonicalize_name

from nanotrain_core.errors import PluginError, did_you_mean_path

EXPECTED = "expected a .py file, a folder with __init__.py, or one whose pyproject.toml names its plugins"


@attrs.define(frozen=True, kw_only=True)
class LocalPlugin:
    """A plugin that is not installed."""

    name: str
    """Name of its file without ``.py``, of its package, or of its entry point."""
    distribution: str
    """Name of the file or folder, or the distribution's name in pyproject.toml."""
    dependencies: tuple[str, ...] = ()
    """Distributions that it needs, as declared in pyproject.toml."""
    files: tuple[Path, ...]
    """Its code files."""
    load: Callable[[], Any]
    """Imports it; raises whatever its code raises."""

    def digest(self) -> str:
        """Return a hash of its code, used as its version."""
        found = hashlib.sha256()
        for file in self.files:
            found.update(file.read_bytes())
        return f"sha256-{found.hexdigest()[:12]}"


def local_plugins(path: Path, group: str) -> Iterator[LocalPlugin]:
    """Yield the plugins at ``path``: several, if a distribution's entry-point ``group`` names several.

    Raises:
        PluginError: there are none; the text says what was expected.
    """
    if path.name == "__init__.py":
        path = path.parent
    project = path / "pyproject.toml"
    if path.is_dir() and project.is_file():
        named = list(_of_distribution(path, project, group))
        if named:
            yield from named
            return
    if (path / "__init__.py").is_file():
        yield _package(path)
    elif path.is_dir():
        inside = ", ".join(sorted(file.parent.name for file in path.glob("*/__init__.py")))
        lacks = f'its pyproject.toml has no [project.entry-points."{group}"]; ' if project.is_file() else ""
        raise PluginError(f"{path}: {lacks}{EXPECTED}" + (f"; packages in it: {inside}" if inside else ""))
    elif not path.exists():
        raise PluginError(f"{path}: no such file or folder{did_you_mean_path(path)}")
    else:
        yield LocalPlugin(
            name=path.stem, distribution=path.name, files=(path,), load=lambda: _import_file(path)
        )


def _import_file(path: Path) -> ModuleType:
    """Import a file under a unique name, so that ``f"{__name__}:Thing"`` works as a factory.

    The name contains a hash of the path: another file of the same name would replace it otherwise.
    """
    if path.suffix != ".py":
        raise PluginError("not a Python file: its name must end in .py")
    place = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    return _import(f"nanotrain_local_{path.stem.replace('.', '_')}_{place}", path)


def _import(name: str, path: Path) -> ModuleType:
    folders = [str(path.parent)] if path.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=folders)
    assert spec is not None, "a name that ends in .py has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        for imported in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
            del sys.modules[imported]
        raise
    return module


def _package(path: Path) -> LocalPlugin:
    """Return the plugin of a package. It is imported under its own name, which its modules may use."""
    name = path.name
    if not name.isidentifier():
        raise PluginError(f"{path}: a package's folder is named as a module: letters, digits, underscores")

    def load() -> ModuleType:
        _refuse_another(name, path)
        return sys.modules.get(name) or _import(name, path / "__init__.py")

    return LocalPlugin(name=name, distribution=name, files=_code(path), load=load)


def _of_distribution(path: Path, project: Path, group: str) -> Iterator[LocalPlugin]:
    try:
        table = _table(tomli.loads(project.read_text(encoding="utf-8")), "project", project)
    except (OSError, UnicodeDecodeError, tomli.TOMLDecodeError) as error:
        raise PluginError(f"{project}: cannot be read: {error}") from None
    entries = _table(_table(table, "entry-points", project), group, project)
    for name, value in entries.items():
        label = f'{project}: {group}: {name} = "{value}"'
        module = str(value).partition(":")[0].strip()
        top = module.partition(".")[0]
        roots = [
            folder
            for folder in (path, path / "src")
            if _code(folder / top) or (folder / f"{top}.py").is_file()
        ]
        if not roots:
            raise PluginError(f"{label}: there is no module {top} in {path} or its src")
        yield LocalPlugin(
            name=name,
            distribution=canonicalize_name(str(table.get("name", path.name))),
            dependencies=tuple(map(str, table.get("dependencies", ()))),
            files=_code(roots[0] / top) or (roots[0] / f"{top}.py",),
            load=_loader(EntryPoint(name, str(value), group), top, roots[0]),
        )


def _table(around: dict[str, Any], key: str, project: Path) -> dict[str, Any]:
    found = around.get(key, {})
    if not isinstance(found, dict):
        raise PluginError(f"{project}: {key}: expected a table, got {found!r}")
    return found


def _loader(entry: EntryPoint, top: str, root: Path) -> Callable[[], Any]:
    def load() -> Any:
        _refuse_another(top, root / top)
        if str(root) not in sys.path:
            sys.path.append(str(root))  # last: it must not hide other modules
        return entry.load()

    return load


def _refuse_another(name: str, path: Path) -> None:
    """Reject a module whose name is already taken by another, which would be imported instead."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return
    places = [Path(place) for place in (spec.origin, *(spec.submodule_search_locations or ())) if place]
    if not {path.resolve(), path.with_suffix(".py").resolve()} & {place.resolve() for place in places}:
        raise PluginError(
            f"module {name} is there already, at {places[0] if places else 'no file'}: rename one"
        )


def _code(folder: Path) -> tuple[Path, ...]:
    """Return the Python files of a package, in the same order everywhere."""
    return tuple(sorted(folder.rglob("*.py"))) if (folder / "__init__.py").is_file() else ()
