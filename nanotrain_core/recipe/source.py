"""The sources of a recipe's values: files, ``--set`` options, and the built-in defaults."""

from __future__ import annotations

import os
from functools import cached_property
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import tomli
import tomli_w

from nanotrain_core.component import LISTED_KINDS
from nanotrain_core.errors import RecipeError, alike, did_you_mean
from nanotrain_core.recipe.locate import key_lines
from nanotrain_core.recipe.suggestions import as_written
from nanotrain_core.recipe.tree import DEFAULT_USE

#: Maximum nesting: recipe keys have few levels, so deeper files and plugins are mistaken or hostile.
MOST_LEVELS = 32
TOO_DEEP = f"tables or arrays are nested too deeply; expected at most {MOST_LEVELS} levels"


class Source:
    """One layer of a recipe: its tables as written, and their location."""

    def __init__(
        self, label: str, data: dict[str, Any], *, text: str = "", folder: Path | None = None
    ) -> None:
        if _is_too_deep(data):
            raise RecipeError([f"{label}: {TOO_DEEP}"])
        self.label = label
        self.data = data
        self.folder = folder or Path.cwd()
        self._text = text

    @cached_property
    def _lines(self) -> dict[str, int]:
        return key_lines(self._text)

    def place(self, key: str) -> str:
        """Return ``file:line`` of a key or of the nearest enclosing table, or only the label."""
        while key and key not in self._lines:
            key = key.rpartition(".")[0]
        return f"{self.label}:{self._lines[key]}" if key else self.label


def _is_too_deep(data: dict[str, Any]) -> bool:
    """Return whether tables and arrays are nested more than :data:`MOST_LEVELS` deep, level by level."""
    level: list[Any] = [data]
    for _ in range(MOST_LEVELS):
        below = [each.values() if isinstance(each, dict) else each for each in level]
        level = [value for values in below for value in values if isinstance(value, dict | list)]
    return bool(level)


def default_source() -> Source:
    """Return the base layer of every recipe: the default components."""
    data: dict[str, Any] = {}
    for kind, use in DEFAULT_USE.items():
        data[kind] = [{"use": name} for name in use] if kind in LISTED_KINDS else {"use": use}
    return Source("default", data)


def option_source(name: str, key: str, value: Any) -> Source:
    """Return the layer of one command-line option that sets ``section.key``."""
    section, _, field = key.partition(".")
    return Source(name, {section: {field: value}})


def override_source(number: int, text: str) -> Source:
    """Return the layer of one ``--set``: a line of TOML, or ``key=word`` with an unquoted string.

    Raises:
        RecipeError: it is neither.
    """
    label = f"--set #{number}"
    key, equals, word = text.partition("=")
    if not equals:
        raise RecipeError([f"{label}: expected KEY=VALUE, for example optimizer.lr=1e-3, got '{text}'"])
    try:
        data = _loads(text, f"{label}: {key.strip()}")
    except tomli.TOMLDecodeError:
        quoted = tomli_w.dumps({"word": word.strip()}).partition("=")[2]
        try:
            data = tomli.loads(f"{key}={quoted}")
        except tomli.TOMLDecodeError as error:
            raise RecipeError([f"{label}: '{text}': {error}"]) from None
    if "extends" in data:
        raise RecipeError([f"{label}: extends: only a file can extend another"])
    return Source(label, data)


def file_source(path: Path) -> Source:
    """Read one recipe file.

    Raises:
        RecipeError: it cannot be read or is not TOML.
    """
    label = os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
        return Source(label, _loads(text, label), text=text, folder=path.parent)
    except OSError as error:
        raise RecipeError([f"{label}: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        raise RecipeError([f"{label}: not UTF-8 text (byte {error.start})"]) from None
    except tomli.TOMLDecodeError as error:
        where = f"{label}:{error.lineno}"
        at = f" (column {error.colno}){_hint(error.msg, text.splitlines()[error.lineno - 1])}"
        raise RecipeError([f"{where}: {as_written(error.msg)}{at}"]) from None


def _hint(problem: str, line: str) -> str:
    """Return what is likely to be wrong with a line that is no TOML: a clause, or an empty string."""
    key, equals, value = (part.strip() for part in line.partition("="))
    if problem == "Cannot overwrite a value" and equals:
        return f": {key} is there already"
    if (
        problem.startswith(("Invalid value", "Expected newline or end of document"))
        and value[:1] not in "'\""
    ):
        return ': expected a number without a unit (4096, 3e-4), true or false, or text in quotes ("adamw")'
    return ""


def _loads(text: str, label: str) -> dict[str, Any]:
    """Parse TOML; reject what has no place in a recipe, with ``label``."""
    try:
        return tomli.loads(text)
    except (RecursionError, ValueError) as error:
        if isinstance(error, tomli.TOMLDecodeError):
            raise
        why = TOO_DEEP if isinstance(error, RecursionError) else "an integer has thousands of digits"
        raise RecipeError([f"{label}: {why}"]) from None


def file_sources(path: Path) -> list[Source]:
    """Read a recipe file and those it extends, base first.

    Raises:
        RecipeError: one cannot be read, or they extend each other in a cycle.
    """
    chain: list[Source] = []
    seen: list[Path] = []
    following: Path | None = path.resolve()
    while following is not None:
        source = file_source(following)
        seen.append(following)
        chain.append(source)
        following = _parent(source)
        if following in seen:
            names = " -> ".join(p.name for p in [*seen[seen.index(following) :], following])
            raise RecipeError([f"{source.place('extends')}: extends: recipes extend each other: {names}"])
    return chain[::-1]


def _parent(source: Source) -> Path | None:
    """Remove ``extends`` from a source and return the file it names: a sibling, or a shipped recipe."""
    name = source.data.pop("extends", None)
    if name is None:
        return None
    place = f"{source.place('extends')}: extends"
    if not isinstance(name, str):
        raise RecipeError([f"{place}: expected the path of one recipe, got {name!r}"])
    beside = source.folder / name
    if os.path.isfile(beside):
        return beside.resolve()
    shipped = shipped_recipes()
    for candidate in (name, f"{name}.toml"):
        if candidate in shipped:
            return shipped[candidate].resolve()
    names = alike(Path(name), sorted({*shipped, *(p.name for p in source.folder.glob("*.toml"))}))
    same = [other for other in names if Path(other).stem == Path(name).stem]
    near = did_you_mean(name, same or names, cutoff=0.0)
    raise RecipeError([f"{place}: no file {beside} and no shipped recipe '{name}'{near}"])


def find_recipe(name: str | os.PathLike[str]) -> Path:
    """Return the file of a recipe given by path, or of a shipped one given by name (``laptop``).

    Raises:
        RecipeError: there is none; the nearest name is suggested.
    """
    path = Path(name)
    if path.is_file():
        return path
    shipped = shipped_recipes()
    for candidate in (str(name), f"{name}.toml"):
        if candidate in shipped:
            return shipped[candidate]
    if path.is_dir():
        raise RecipeError([f"{path}: is a folder; name a recipe file in it"])
    around = [str(p) for p in path.parent.glob("*.toml")]
    names = alike(path, [*around, *(file.removesuffix(".toml") for file in shipped)])
    near = did_you_mean(str(name), names) or did_you_mean(path.stem, names)
    what = "file" if path.suffix == ".toml" or path.parent != Path() else "recipe"
    raise RecipeError([f"{name}: no such {what}{near}; `nanotrain recipes` lists the recipes shipped"])


def shipped_recipes() -> dict[str, Path]:
    """Return name -> file of all recipes in ``./recipes`` and in the installation.

    A name is the path relative to the folder: ``laptop.toml``, ``fragments/deepseek_tiny.toml``.
    """
    checkout = Path(__file__).parents[2]
    editable = (checkout / "pyproject.toml").is_file()
    found = _recipes_in(checkout / "recipes") if editable else _installed_recipes()
    return dict(sorted((found | _recipes_in(Path("recipes"))).items()))


def is_recipe(word: str) -> bool:
    """Return whether a word of a command names a recipe: a TOML file, or a shipped recipe."""
    return word.endswith(".toml") or f"{word}.toml" in shipped_recipes()


def _recipes_in(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.toml")}


def _installed_recipes() -> dict[str, Path]:
    """Find the recipes that the wheel installed under ``share/nanotrain/recipes`` of the environment."""
    try:
        listed = files("nanotrain-core") or ()
    except PackageNotFoundError:
        return {}
    shared = ((file, file.as_posix().partition("share/nanotrain/recipes/")[2]) for file in listed)
    return {name: Path(str(file.locate())).resolve() for file, name in shared if name.endswith(".toml")}
