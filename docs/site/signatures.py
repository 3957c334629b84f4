"""How a function or class is called, as its source writes it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

#: Finds the definition of a name that a file imports or has.
Find = Callable[[Path, str], "tuple[Path, ast.stmt | None]"]


def of_function(node: ast.FunctionDef) -> str:
    """Return the parameters of a function or method without ``self``, and what it returns, if anything."""
    args = node.args
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + args.defaults
    shown = [_parameter(each, default) for each, default in zip(positional, defaults, strict=True)]
    if args.posonlyargs:
        shown.insert(len(args.posonlyargs), "/")
    if positional and positional[0].arg in ("self", "cls"):
        shown = shown[1:]
    if args.vararg:
        shown.append(f"*{_parameter(args.vararg, None)}")
    elif args.kwonlyargs:
        shown.append("*")
    shown += [_parameter(*each) for each in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    shown += [f"**{_parameter(args.kwarg, None)}"] if args.kwarg else []
    returns = ast.unparse(node.returns) if node.returns else "None"
    return f"({', '.join(shown)})" + (f" -> {returns}" if returns != "None" else "")


def of_class(path: Path, node: ast.ClassDef, find: Find) -> str:
    """Return the parameters of a class's constructor; empty if the core does not define it."""
    lineage = [*_lineage(path, node, find)]
    shown: dict[str, str] = {}
    keyword = {}
    for number, each in enumerate(lineage):
        functions = {inner.name: inner for inner in each.body if isinstance(inner, ast.FunctionDef)}
        if constructor := functions.get("__new__") or functions.get("__init__"):
            return of_function(constructor).partition(" -> ")[0]
        if _has_fields(each):
            for base in reversed(lineage[number:]):
                for name, written, only in _fields(base):
                    shown[name], keyword[name] = written, only
            break
    else:
        return ""
    plain = [shown[name] for name in shown if not keyword[name]]
    only = [shown[name] for name in shown if keyword[name]]
    return f"({', '.join([*plain, *(['*', *only] if only else [])])})"


def of_value(node: ast.stmt) -> str:
    """Return what a name is assigned if that is short, or its annotation."""
    match node:
        case ast.AnnAssign(annotation=kind, value=value):
            shown = f" = {ast.unparse(value)}" if isinstance(value, ast.Constant) else ""
            return f": {ast.unparse(kind)}{shown}"
        case ast.Assign(value=value):
            private = any(isinstance(each, ast.Name) and each.id.startswith("_") for each in ast.walk(value))
            shown = ast.unparse(value)
            return f" = {shown}" if len(shown) <= 100 and not private else ""
    return ""


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(argument.annotation)}" if argument.annotation else ""
    equals = " = " if kind else "="
    return argument.arg + kind + (equals + ast.unparse(default) if default else "")


def _lineage(path: Path, node: ast.ClassDef, find: Find) -> Iterator[ast.ClassDef]:
    """Yield a class and those of the core from which it inherits, nearest first."""
    yield node
    for base in node.bases:
        name = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(name, ast.Name):
            file, found = find(path, name.id)
            if isinstance(found, ast.ClassDef):
                yield from _lineage(file, found, find)


def _has_fields(node: ast.ClassDef) -> bool:
    decorators = [ast.unparse(each) for each in node.decorator_list]
    named = any(ast.unparse(base) == "NamedTuple" for base in node.bases)
    return named or any(each.startswith(("attrs.define", "define", "dataclass")) for each in decorators)


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str, bool]]:
    """Yield each field that the constructor takes: name, parameter, and whether it is keyword-only."""
    if not _has_fields(node):
        return
    all_keyword = any("kw_only=True" in ast.unparse(each) for each in node.decorator_list)
    for each in node.body:
        match each:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=kind, value=value):
                options = _options(value)
                if ast.unparse(kind).startswith("ClassVar") or not _is(options.get("init"), default=True):
                    continue
                default = f" = {written}" if (written := default_of(each)) else ""
                parameter = f"{name.lstrip('_')}: {ast.unparse(kind)}{default}"
                yield name, parameter, all_keyword or _is(options.get("kw_only"), default=False)


def _is(option: ast.expr | None, *, default: bool) -> bool:
    return default if option is None else ast.unparse(option) == "True"


def default_of(field: ast.AnnAssign) -> str:
    """Return a field's default; empty if it has none."""
    options = _options(field.value)
    match options.get("factory", options.get("default_factory")):
        case ast.Lambda(body=default):
            return ast.unparse(default)
        case ast.Name(id="dict" | "list" as name):
            return {"dict": "{}", "list": "[]"}[name]
        case ast.expr() as factory:
            return f"{ast.unparse(factory)}()"
    return ast.unparse(options["default"]) if "default" in options else ""


def _options(value: ast.expr | None) -> dict[str, ast.expr]:
    """Return the options of ``attrs.field(...)`` and functions that call it; a plain value is the default."""
    match value:
        case None:
            return {}
        case ast.Call(func=function, keywords=keywords) if ast.unparse(function).endswith("field"):
            return {str(each.arg): each.value for each in keywords}
    return {"default": value}
