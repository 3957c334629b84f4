"""What the core's source says of the names that plugins may import, read without importing it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
#: Modules that plugins may import.
API_MODULES = (
    "nanotrain_core.api",
    "nanotrain_core.api.torch",
    "nanotrain_core.api.models",
    "nanotrain_core.api.ranks",
    "nanotrain_core.api.text",
)


class Name(NamedTuple):
    """One name, as it is offered."""

    name: str
    path: Path
    """Of the file that defines it."""
    sentence: str
    """Empty where it has no docstring."""
    node: ast.stmt | None
    """Its definition, under the name it has in that file."""


def file_of(module: str) -> Path:
    """Return the file of a module, or of a package's ``__init__``."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def modules_of(api: str) -> list[str]:
    """Return the modules that list an API module's names: itself, or those that it re-exports."""
    imports = [node for node in parsed(file_of(api)).body if isinstance(node, ast.ImportFrom)]
    return [node.module for node in imports if node.module and node.names[0].name == "*"] or [api]


def names_of(api: str) -> list[Name]:
    """Return the public names of a module, in the order in which a reader would look them up."""
    names = (name for module in modules_of(api) for name in _listed(module))
    return [Name(name, *_defined(api, name)) for name in sorted(names, key=str.lower)]


def _listed(module: str) -> list[str]:
    """Return the ``__all__`` of a module that re-exports no other's."""
    body = parsed(file_of(module)).body
    (listed,) = (
        node.value for node in body if isinstance(node, ast.Assign) and _targets(node) == ["__all__"]
    )
    return list(ast.literal_eval(listed))


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def _targets(node: ast.stmt) -> list[str]:
    match node:
        case ast.Assign(targets=targets):
            return [each.id for each in targets if isinstance(each, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
            return [name]
    return []


def _defined(module: str, name: str) -> tuple[Path, str, ast.stmt | None]:
    """Follow imports to where a name is defined; return the file, the sentence about it and the statement."""
    path, node = find(file_of(module), name)
    if node is None:
        return path, "", None
    text = ast.get_docstring(node) if isinstance(node, ast.ClassDef | ast.FunctionDef) else None
    body = list(_statements(parsed(path).body))
    text = text or text_behind(body, body.index(node)) or _comment_before(path, node.lineno)
    return path, first_sentence(text), node


def find(path: Path, name: str) -> tuple[Path, ast.stmt | None]:
    """Return the file and the statement that define a name of a file: none if it is not the core's."""
    body = list(_statements(parsed(path).body))
    for node in body:
        if name in _targets(node):
            return path, node
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("nanotrain_core"):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return find(file_of(node.module), alias.name)
                if alias.name == "*" and name in _listed(node.module):
                    return find(file_of(node.module), name)
    return path, None


def text_behind(body: list[ast.stmt], number: int) -> str:
    """Return the string that follows a statement, such as a field's docstring; empty if there is none."""
    match body[number + 1 : number + 2]:
        case [ast.Expr(value=ast.Constant(value=str(text)))]:
            return text
    return ""


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If):  # TYPE_CHECKING
            yield from _statements(node.body)


def _comment_before(path: Path, line: int) -> str:
    """Return the lines that begin with ``#:`` just above a line."""
    found: list[str] = []
    for above in reversed(path.read_text(encoding="utf-8").splitlines()[: line - 1]):
        if not above.startswith("#:"):
            break
        found.insert(0, above.removeprefix("#:").strip())
    return " ".join(found)


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring as Markdown."""
    words = plain(text.strip().partition("\n\n")[0])
    return re.split(r"(?<=[^.][.])(?<!e\.g\.)(?<!i\.e\.)\s+(?=[A-Z`])", words)[0]


def plain(text: str) -> str:
    """Return a docstring as Markdown: on one line, references as code."""
    words = " ".join(text.split())
    return re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", words).replace("``", "`")
