"""The pages that are generated: of each plugin, of each table of a recipe, of each command, of source files.

Pure functions: what they return is Markdown by the path it has in the site. ``hooks.py`` hands them to
MkDocs; tests/test_site.py reads them without it.
"""

from __future__ import annotations

import argparse
import posixpath
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs

from nanotrain_core.cli.common import add_plugin_options
from nanotrain_core.command import CORE_COMMANDS
from nanotrain_core.component import KINDS, LISTED_KINDS, Component
from nanotrain_core.recipe.schema import recipe_schema
from nanotrain_core.recipe.tree import BatchConfig, EvaluationConfig, RunConfig
from nanotrain_core.registry.registry import Registry, load_plugins
from nanotrain_core.testing.checks import every_check

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CORE_TABLES = {"run": RunConfig, "batch": BatchConfig, "evaluation": EvaluationConfig}

#: A link's target in Markdown, without its fragment; pictures too.
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)")

CODE_BLOCK = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)

#: Code is left alone: blocks, and spans in a line.
CODE = re.compile(r"^( *)```.*?^\1```|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def generated() -> dict[str, str]:
    """Return all pages but those of source files: path in the site -> Markdown with the repository's links.

    Raises:
        RuntimeError: a plugin of this repository is not installed, or does not load.
    """
    readmes = {path.parent.name: path for path in sorted(ROOT.glob("plugins/*/README.md"))}
    registry = repository_plugins({*readmes})
    there = {plugin.name for plugin in registry.plugins}
    if missing := sorted({*readmes} - there) + [str(plugin) for plugin in registry.broken]:
        raise RuntimeError(f"not installed, or broken: {', '.join(missing)}; see requirements-dev.txt")
    pages = {f"plugins/{name}.md": plugin_page(name, path, registry) for name, path in readmes.items()}
    schema = recipe_schema(registry)
    pages |= {f"recipe/{name}.md": table_page(name, registry, schema) for name in (*CORE_TABLES, *KINDS)}
    pages |= {f"commands/{name}.md": page for name, page in command_pages(registry).items()}
    pages["plugins/index.md"] = _index(
        "Plugins", "One distribution each: `pip install nanotrain-NAME`.", pages
    )
    pages["recipe/index.md"] = _index(
        "Recipe keys",
        "Every key of every table that the core and the plugins of this repository have. `nanotrain schema` "
        "prints the same for the installed plugins; [recipes](../recipes.md) describes how tables are "
        "merged and checked, and those of `[[phase]]`.",
        pages,
    )
    pages["commands/index.md"] = _index("Commands", "`nanotrain COMMAND --help` prints the same.", pages)
    return pages


def repository_plugins(names: set[str]) -> Registry:
    """Return a registry of the core and the plugins ``names``, without others that are installed."""
    registry = load_plugins()
    others = {each.name for each in (*registry.plugins, *registry.broken)} - names - {"builtin"}
    return load_plugins(block=sorted(others)) if others else registry


def _index(title: str, text: str, pages: dict[str, str]) -> str:
    folder = {"Plugins": "plugins", "Recipe keys": "recipe", "Commands": "commands"}[title]
    lines = [f"# {title}", "", text, "", "| | |", "|---|---|"]
    for path, page in pages.items():
        if path.startswith(f"{folder}/"):
            name = Path(path).stem
            paragraphs = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL).split("\n\n")
            words = " ".join(next(p for p in paragraphs if p.strip() and p.strip()[0] not in "#|<").split())
            lines.append(f"| [{name}]({name}.md) | {re.split(r'(?<=[.:;]) ', words)[0].rstrip(':;')} |")
    return "\n".join(lines) + "\n"


# --- plugins --------------------------------------------------------------------------------------


def plugin_page(name: str, readme: Path, registry: Registry) -> str:
    """Return a plugin's README, and what it registers."""
    text = relinked(readme.read_text(encoding="utf-8"), readme.parent, ROOT / "docs/plugins").rstrip()
    (plugin,) = (each for each in registry.plugins if each.name == name)
    lines = [
        "",
        "",
        "## What it registers",
        "",
        "| kind | name | what it is | capabilities |",
        "|---|---|---|---|",
    ]
    for kind, component in plugin.components:
        link = f"[`{component.name}`](../recipe/{kind}.md#{anchor(component.name)})"
        lines.append(f"| {kind} | {link} | {component.summary} | {_capabilities(component)} |")
    for command in plugin.commands:
        link = f"[`nanotrain {command.name}`](../commands/{command.name}.md)"
        lines.append(f"| command | {link} | {command.summary} | |")
    return (
        text
        + "\n".join(lines)
        + f"\n\nDistribution `{plugin.distribution}` {plugin.version}, for `nanotrain-core` "
        + f"{plugin.requires_core}.\n"
    )


def _capabilities(component: Component) -> str:
    words = [
        f"{what} {', '.join(f'`{word}`' for word in sorted(found))}"
        for what, found in (
            ("provides", component.provides),
            ("requires", component.requires),
            ("conflicts with", component.conflicts),
            ("dimensions", component.mesh_dims),
        )
        if found
    ]
    return "; ".join(words)


# --- recipe keys ----------------------------------------------------------------------------------


def table_page(name: str, registry: Registry, schema: dict[str, Any]) -> str:
    """Return every key of one table of a recipe; of a kind, for each of its components."""
    if name in CORE_TABLES:
        keys = _keys(name, CORE_TABLES[name], schema["properties"][name], name)
        return "\n".join([f"# [{name}]", "", f"Keys of `[{name}]`.", "", *keys]) + "\n"
    shown = f"[[{name}]]" if name in LISTED_KINDS else f"[{name}]"
    lines = [
        f"# {shown}",
        "",
        f"{', '.join(f'`{use}`' for use in registry.names(name))}; [how to write one](../kinds/{name}.md).",
        "",
    ]
    for use in registry.names(name):
        component, owner = registry.get(name, use), registry.owner(name, use)
        of = (
            "built in" if owner.name == "builtin" else f"[`{owner.distribution}`](../plugins/{owner.name}.md)"
        )
        capabilities = _capabilities(component)
        lines += [f'## `use = "{use}"` {{ #{anchor(use)} }}', "", f"{component.summary} ({of}).", ""]
        lines += (
            [f"It {capabilities}.".replace("It dimensions", "It handles dimensions"), ""]
            if capabilities
            else []
        )
        found = schema["definitions"][f"{name}.{use}"]
        lines += _keys(name, component.config, found, anchor(use)) or ["It has no keys.", ""]
    return "\n".join(lines) + "\n"


def _keys(table: str, config: Any, schema: dict[str, Any], prefix: str) -> list[str]:
    lines = []
    for field in attrs.fields(config):
        key = schema["properties"].get(field.name, {})
        lines += [f"### `{field.name}` {{ #{prefix}-{anchor(field.name)} }}", ""]
        lines += [f"{_type(key)}; {_default(field.default)}.", ""]
        lines += [key["description"].replace("``", "`"), ""] if key.get("description") else []
        inner = key.get("properties", {})
        if inner:
            lines += ["| key of it | type | default | |", "|---|---|---|---|"]
            for name, each in inner.items():
                text = " ".join(each.get("description", "").replace("``", "`").split()).replace("|", "\\|")
                told = _shown(each["default"]) if "default" in each else "unset"
                lines.append(f"| `{name}` | {_type(each)} | {told} | {text} |")
            lines.append("")
    return lines


def _type(schema: dict[str, Any]) -> str:
    """Return what a key may be, in words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(each) for each in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return " or ".join(_shown(each) for each in schema.get("enum", [schema.get("const")]))
    words = {
        "boolean": "true or false",
        "integer": "integer",
        "number": "number",
        "string": "text",
        "object": "table",
    }
    kind = schema.get("type")
    if kind == "array":
        items = schema.get("items", {})
        return f"list of {len(items)} values" if isinstance(items, list) else f"list: {_type(items)}"
    bounds = [
        f"{sign} {schema[key]:g}"
        for key, sign in (
            ("minimum", ">="),
            ("exclusiveMinimum", ">"),
            ("exclusiveMaximum", "<"),
            ("maximum", "<="),
        )
        if key in schema and abs(schema[key]) < 2**31 - 1
    ]
    return " ".join([words.get(str(kind), str(kind or "any value")), ", ".join(bounds)]).strip()


def _default(default: Any) -> str:
    if default is attrs.NOTHING:
        return "must be given"
    if default is None or isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        return "unset if left out"
    return f"default {_shown(default)}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, tuple | list):
        return f"`[{', '.join(_shown(each).strip('`') for each in value)}]`"
    return "a table of its own defaults" if attrs.has(type(value)) else f"`{value}`"


def anchor(word: str) -> str:
    """Return a name as a fragment."""
    return re.sub(r"[^\w-]", "-", word.lower())


# --- commands -------------------------------------------------------------------------------------


def command_pages(registry: Registry) -> dict[str, str]:
    """Return a page for each command of the core and of the plugins."""
    added = registry.commands()
    pages = {}
    for name, summary in {**CORE_COMMANDS, **{name: each.summary for name, each in added.items()}}.items():
        parser = parser_of(name, registry)
        of = "built in"
        if name in added:
            owner = next(
                p for p in registry.plugins if any(c.name == name and not c.extends for c in p.commands)
            )
            of = f"of [`{owner.distribution}`](../plugins/{owner.name}.md)"
        usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
        lines = [f"# nanotrain {name}", "", f"{summary[:1].upper()}{summary[1:]} ({of}).", ""]
        lines += ["<!-- usage -->", "```text", _wrapped(usage), "```", "", "| option | |", "|---|---|"]
        lines += [f"| {option} | {text} |" for option, text in _options(parser)]
        pages[name] = "\n".join(lines) + "\n"
    return pages


def parser_of(name: str, registry: Registry) -> argparse.ArgumentParser:
    """Return the parser of one command, extensions of other plugins included."""
    parser = argparse.ArgumentParser(prog=f"nanotrain {name}", add_help=False)
    core = name in CORE_COMMANDS
    modules = [
        import_module(f"nanotrain_core.cli.{name.replace('-', '_')}")
        if core
        else registry.command(name).load()
    ]
    modules += [] if core else [extension.load() for extension in registry.extensions(name)]
    for module in modules:
        module.add_arguments(parser)
    if not core:
        add_plugin_options(parser)
    return parser


def _options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            told = {each.dest: each.help or "" for each in action._choices_actions}
            for word, inner in action.choices.items():
                if word not in told:  # another name of one
                    continue
                yield f"**`{word}`**", _cell(told[word])
                yield from ((f"`{word}` {option}", text) for option, text in _options(inner))
        elif action.help is not argparse.SUPPRESS and "--help" not in action.option_strings:
            value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
            if action.choices:
                value = "{" + ",".join(map(str, action.choices)) + "}"
            words = [f"{each} {value}".strip() for each in action.option_strings] or [str(value)]
            text = (action.help or "") % {**vars(action), "prog": parser.prog}
            yield ", ".join(f"`{word}`" for word in words).replace("|", "\\|"), _cell(text)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _wrapped(usage: str) -> str:
    lines, room = [""], 100
    for word in re.findall(r"\[[^\]]*\]|\S+", usage):
        if len(lines[-1]) + len(word) > room:
            lines.append("   ")
        lines[-1] = f"{lines[-1]} {word}".lstrip() if len(lines) == 1 else f"{lines[-1]} {word}"
    return "\n".join(lines)


# --- conformance checks of a kind, and source files -----------------------------------------------


def checks_of_kind(kind: str) -> str:
    """Return a table of the conformance checks that components of a kind are held to."""
    lines = [
        "## Its conformance checks",
        "",
        "Generated from the harness: these, and the checks for every kind.",
        "",
    ]
    lines += ["| check | invariant |", "|---|---|"]
    own = {"gradient_sync": "parallel"}.get(kind, kind)
    for each in every_check():
        if each.kind in (own, "every"):
            variants = f" ({', '.join(each.variants)})" if each.variants else ""
            lines.append(f"| `{each.name}`{variants} | {_cell(each.invariant)} |")
    return "\n".join(lines) + "\n"


def source_page(path: Path) -> str:
    """Return a file of the repository as a page, or what is in one of its folders."""
    name = path.relative_to(ROOT)
    if path.is_dir():
        inside = sorted(each for each in path.rglob("*.py") if "__pycache__" not in each.parts)
        rows = [f"| `{each.relative_to(path)}` | {_cell(_first_line(each))} |" for each in inside]
        return "\n".join([f"# {name}/", "", "| file | |", "|---|---|", *rows]) + "\n"
    language = {".py": "python", ".toml": "toml", ".json": "json", ".yml": "yaml"}.get(path.suffix, "text")
    text = path.read_text(encoding="utf-8").rstrip("\n")
    if path.suffix == ".md":
        return relinked(text, path.parent, DOCS / "source" / name.parent) + "\n"
    return f"# {name}\n\n````{language}\n{text}\n````\n"


def _first_line(path: Path) -> str:
    found = re.match(r'(?:#.*\n)*r?"""(.+?)(?:"""|\n\n)', path.read_text(encoding="utf-8"), re.DOTALL)
    return found[1] if found else ""


# --- links ----------------------------------------------------------------------------------------


def in_site(target: Path) -> str | None:
    """Return where a file of the repository is in the site; None if it does not exist.

    Files beside docs/ that pages link to become pages: READMEs of plugins, and source files.
    """
    target = Path(posixpath.normpath(target))
    if target.is_relative_to(DOCS) and not target.is_relative_to(DOCS / "site"):
        inside = target.relative_to(DOCS)
        # Of pages that are generated there is no file.
        return str(inside) if target.is_file() or inside.parts[0] in GENERATED else None
    if not target.exists():
        return None
    name = target.relative_to(ROOT)
    match name.parts:
        case ("README.md",):
            return "index.md"
        case ("plugins", plugin, "README.md") | ("plugins", plugin):
            return f"plugins/{plugin}.md"
        case ("plugins",):
            return "plugins/index.md"
    return f"source/{name}" if target.suffix == ".md" else f"source/{name}.md"


GENERATED = ("plugins", "recipe", "commands", "source")


def relinked(text: str, folder: Path, to: Path) -> str:
    """Return Markdown whose relative links from ``folder`` lead to the same files from the folder ``to``."""

    def moved(match: re.Match[str]) -> str:
        return posixpath.relpath(posixpath.normpath(folder / match[1]), to)

    return outside_code(text, lambda part: LINK.sub(moved, part))


def outside_code(text: str, change: Any) -> str:
    """Return Markdown with everything but its code changed."""
    parts, last = [], 0
    for code in CODE.finditer(text):
        parts += [change(text[last : code.start()]), code[0]]
        last = code.end()
    return "".join([*parts, change(text[last:])])


def site_links(text: str, page: str) -> tuple[str, set[Path]]:
    """Return the Markdown of a page with links as the site has them, and which source files it links to."""
    sources: set[Path] = set()
    folder = posixpath.dirname(page)

    def led(match: re.Match[str]) -> str:
        target = Path(posixpath.normpath(DOCS / folder / match[1]))
        uri = in_site(target)
        if uri is None:
            return match[1]  # which strict mode then tells
        if uri.startswith("source/"):
            sources.add(target)
        return posixpath.relpath(uri, folder or ".")

    return outside_code(text, lambda part: LINK.sub(led, part)), sources
